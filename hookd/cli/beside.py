"""A daemon beside the command of `hookd run --listen`, in a thread: it serves the processes that we have started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Collection
from concurrent.futures import Future
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookd.config import ServeConfig


class Descendants(Collection[int]):
    """The pids of all processes that descend from this one, at each moment anew."""

    def __iter__(self) -> Iterator[int]:
        import psutil

        return iter([child.pid for child in psutil.Process(os.getpid()).children(recursive=True)])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, pid: object) -> bool:
        return any(pid == one for one in self)


@contextlib.contextmanager
def serving(config: ServeConfig) -> Iterator[str]:
    """Serve as long as the block, and give the URL.

    Raises:
        HookdError: the addresses cannot be bound.
    """
    bound: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()
    thread = threading.Thread(target=_serve, args=(config, bound), name="hookd-serve")
    # Signals are for the main thread, which passes them on to the command.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        url, loop, stop = bound.result()
        try:
            yield url
        finally:
            loop.call_soon_threadsafe(stop.set)
    finally:
        thread.join()


def _serve(config: ServeConfig, bound: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
    from hookd.daemon.service import Service

    async def serve() -> None:
        stop = asyncio.Event()
        async with Service(config, only=Descendants()) as service:
            bound.set_result((service.url, asyncio.get_running_loop(), stop))
            await stop.wait()

    try:
        asyncio.run(serve())
    except BaseException as error:
        if bound.done():
            raise
        bound.set_exception(error)  # the main thread tells it
