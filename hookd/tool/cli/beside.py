"""The daemon of `hookd run`, in a thread of its companion: it serves the processes of the command."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Collection
from concurrent.futures import Future
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookd.tool.config import ServeConfig
    from hookd.tool.daemon.fleet.fleet import Fleet


class Descendants(Collection[int]):
    """The current pids of a process and its descendants, looked up at each use."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def __iter__(self) -> Iterator[int]:
        import psutil

        try:
            return iter([self._pid, *(child.pid for child in psutil.Process(self._pid).children(recursive=True))])
        except psutil.NoSuchProcess:
            return iter(())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, pid: object) -> bool:
        return any(pid == member for member in self)


@contextlib.contextmanager
def serving(config: ServeConfig, pid: int) -> Iterator[str]:
    """Serve a process and its descendants during the block, and yield the URL.

    Raises:
        HookdError: the addresses cannot be bound.
    """
    bound: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()
    thread = threading.Thread(target=_serve, args=(config, pid, bound), name="hookd-serve")
    thread.start()
    try:
        url, loop, stop = bound.result()
        try:
            yield url
        finally:
            loop.call_soon_threadsafe(stop.set)
    finally:
        thread.join()


def _record_ends(fleet: Fleet) -> None:
    """Record the targets that have just ended, before the service stops."""
    for target in fleet.targets():
        if target.ended is None and not target.is_running():
            fleet.lose(target)


def _serve(config: ServeConfig, pid: int, bound: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
    from hookd.tool.daemon.service import Service

    async def serve() -> None:
        stop = asyncio.Event()
        async with Service(config, only=Descendants(pid)) as service:
            bound.set_result((service.url, asyncio.get_running_loop(), stop))
            await stop.wait()
            await asyncio.to_thread(_record_ends, service.fleet)

    try:
        asyncio.run(serve())
    except BaseException as error:
        if bound.done():
            raise
        bound.set_exception(error)  # the main thread reports it
