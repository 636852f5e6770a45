"""State notifications to the service manager: systemd's sd_notify(3), without a library.

systemd names a datagram socket in NOTIFY_SOCKET; without it nothing is sent. Source: sd_notify(3) and
sd_watchdog_enabled(3) of systemd 252.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping


def send(state: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Send one state, such as "READY=1"; return whether it was sent."""
    address = environ.get("NOTIFY_SOCKET", "")
    if address[:1] not in ("/", "@"):
        return False
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)  # a manager that hangs must not hang us
        sender.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)
        return True
    return False


def watchdog_s(environ: Mapping[str, str] = os.environ) -> float | None:
    """Return the manager's watchdog timeout in seconds; None if it has none."""
    text, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not text.isdecimal() or int(text) == 0 or pid not in ("", str(os.getpid())):
        return None
    return int(text) / 1e6


@contextlib.asynccontextmanager
async def serving(environ: Mapping[str, str] = os.environ) -> AsyncIterator[None]:
    """Report readiness for the duration of a block, with watchdog messages from the event loop."""
    limit_s = watchdog_s(environ)
    beat = asyncio.create_task(_beat(limit_s / 2, environ)) if limit_s is not None else None
    send("READY=1", environ)
    try:
        yield
    finally:
        send("STOPPING=1", environ)
        if beat is not None:
            beat.cancel()


async def _beat(interval_s: float, environ: Mapping[str, str]) -> None:
    while True:
        send("WATCHDOG=1", environ)
        await asyncio.sleep(interval_s)
