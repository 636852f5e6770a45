"""The daemon's process: its log, its signals, from its start to its exit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from typing import TYPE_CHECKING

from hookd.tool.daemon import log, notify
from hookd.tool.daemon.fleet import fd_budget
from hookd.tool.daemon.service import Service
from hookd.version import __version__

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from hookd.tool.config import ServeConfig

_log = logging.getLogger(__name__)


def serve(config: ServeConfig, *, only: Collection[int] | None = None) -> int:
    """Serve until SIGTERM, SIGINT or SIGHUP, and give the exit status 0. Agents stay for their lease. Logs go to stderr.

    Raises:
        HookdError: it could not start.
    """
    fd_budget.widen()
    # Whoever started the daemon may have ignored it, which exec passes on: the kernel then reaps children by itself, and hookd
    # could neither wait for one nor know how many of those that it left behind have not returned.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    async def run() -> None:
        async with Service(config, only=only) as service:
            with signals() as stop:
                _log.info("hookd %s serves %s/metrics, control %s", __version__, service.url, service.control)
                async with notify.serving():
                    came = await stop
                _log.info("%s: shutting down; agents stay for %g s", came.name, config.lease_s)

    with log.to_stderr():
        asyncio.run(run())
    return 0


@contextlib.contextmanager
def signals() -> Iterator[asyncio.Future[signal.Signals]]:
    """Catch SIGTERM, SIGINT and, unless it is ignored (nohup), SIGHUP: the future holds the first. Main thread only."""
    loop = asyncio.get_running_loop()
    came: asyncio.Future[signal.Signals] = loop.create_future()

    def arrive(number: signal.Signals) -> None:
        if not came.done():
            came.set_result(number)

    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, arrive, number)
    try:
        yield came
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
