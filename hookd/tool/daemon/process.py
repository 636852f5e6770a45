"""The daemon's process: logging, signals, start and exit."""

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
    """Serve until SIGTERM, SIGINT or SIGHUP and return exit status 0. Agents stay for their lease. Logs go to stderr.

    Raises:
        HookdError: the daemon could not start.
    """
    fd_budget.widen()
    # An ignored SIGCHLD survives exec: the kernel would reap children itself, and hookd could neither wait for one nor
    # count abandoned children that have not exited.
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
    """Catch SIGTERM, SIGINT and, unless ignored (nohup), SIGHUP; the future gets the first. Main thread only."""
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
