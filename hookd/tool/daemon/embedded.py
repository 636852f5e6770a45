"""The daemon inside a foreground `hookd attach PID…`: serves those targets only, and detaches at the end."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Protocol

from hookd.tool.daemon.process import signals
from hookd.tool.daemon.service import Service

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hookd.tool.config import ServeConfig
    from hookd.tool.daemon.actions import Order
    from hookd.wire.answer import Attached, DetachedTarget
    from hookd.wire.target import ErrorRow, ServerStatus, TargetRow


class Reporter(Protocol):
    """Takes the events of a foreground attach, in the thread of `attach_and_serve`."""

    def serving(self, status: ServerStatus) -> None:
        """Take the state of the daemon, before a target is touched."""

    def attached(self, outcomes: Sequence[Attached | ErrorRow]) -> None:
        """Take the outcome of the attach for each pid, in order."""

    def ended(self, target: TargetRow) -> None:
        """Take a target that has ended."""

    def detached(self, outcome: DetachedTarget | ErrorRow) -> None:
        """Take the outcome of a detach."""


def attach_and_serve(config: ServeConfig, pids: Sequence[int], order: Order, reporter: Reporter) -> None:
    """Attach to `pids`, serve them until Ctrl-C or SIGTERM or until all have ended, and detach.

    Both sockets are bound before a target is touched. Targets that another daemon also holds are not detached; with
    `order.keep` none is. If no attach succeeds, this returns at once.

    Raises:
        HookdError: a socket could not be bound.
    """
    asyncio.run(_run(config, pids, order, reporter))


async def _run(config: ServeConfig, pids: Sequence[int], order: Order, reporter: Reporter) -> None:
    async with Service(config, only=frozenset(pids)) as service:
        with signals() as stop:
            reporter.serving(service.status())
            outcomes = await service.attach_all(pids, order)
            reporter.attached(outcomes)
            if any("error" not in outcome for outcome in outcomes):
                await _until(stop, asyncio.create_task(_all_ended(service, config.poll_s, reporter)))
            if not order.keep:
                for detached in await service.detach_own():
                    reporter.detached(detached)


async def _until(stop: asyncio.Future[Any], ended: asyncio.Task[None]) -> None:
    await asyncio.wait((stop, ended), return_when=asyncio.FIRST_COMPLETED)
    ended.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await ended


async def _all_ended(service: Service, poll_s: float, reporter: Reporter) -> None:
    """Return when no target is served any more; ended ones linger first, so that their end can be scraped."""
    reported: set[tuple[int, float]] = set()
    while rows := service.rows():
        for row in rows:
            key = (row["pid"], row["attached"])
            if row["ended"] is not None and key not in reported:
                reported.add(key)
                reporter.ended(row)
        await asyncio.sleep(poll_s)
