"""The daemon inside a foreground `hookd attach PID…`: serves those targets only, and detaches at the end."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from hookd.tool.daemon.process import signals
from hookd.tool.daemon.service import Service

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hookd.tool.config import ServeConfig
    from hookd.tool.daemon.actions import Order
    from hookd.wire.answer import Attached
    from hookd.wire.target import ErrorRow

    Tell = Callable[[str, Any], None]


def attach_and_serve(config: ServeConfig, pids: Sequence[int], order: Order, tell: Tell) -> list[Attached | ErrorRow]:
    """Attach to `pids`, serve them until Ctrl-C or SIGTERM or until all have ended, and detach.

    Both sockets are bound before a target is touched. Targets that another daemon also holds are not detached; with
    `order.keep` none is. If no attach succeeds, this returns at once.

    Args:
        config: the configuration to serve with.
        pids: pids of the targets.
        order: attach parameters for each of them.
        tell: called in this thread with each event: ("serving", status), ("attached", result), ("failed", error with
            its pid), ("ended", row), ("detached", result or error).

    Returns:
        For each pid, in order, the result of its attach or the error: `{"pid", "error", "reason", "hint", "exit_code"}`.

    Raises:
        HookdError: a socket could not be bound.
    """
    return asyncio.run(_run(config, pids, order, tell))


async def _run(config: ServeConfig, pids: Sequence[int], order: Order, tell: Tell) -> list[Attached | ErrorRow]:
    async with Service(config, only=frozenset(pids)) as service:
        with signals() as stop:
            tell("serving", service.status())
            results = await service.attach_all(pids, order)
            for result in results:
                tell("failed" if "error" in result else "attached", result)
            if any("error" not in result for result in results):
                await _until(stop, asyncio.create_task(_all_ended(service, config.poll_s, tell)))
            if not order.keep:
                for outcome in await service.detach_own():
                    tell("detached", outcome)
    return results


async def _until(stop: asyncio.Future[Any], ended: asyncio.Task[None]) -> None:
    await asyncio.wait((stop, ended), return_when=asyncio.FIRST_COMPLETED)
    ended.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await ended


async def _all_ended(service: Service, poll_s: float, tell: Tell) -> None:
    """Return when no target is served any more; ended ones linger first, so that their end can be scraped."""
    reported: set[tuple[int, float]] = set()
    while rows := service.rows():
        for row in rows:
            key = (row["pid"], row["attached"])
            if row["ended"] is not None and key not in reported:
                reported.add(key)
                tell("ended", row)
        await asyncio.sleep(poll_s)
