"""Find out who listens on a TCP port."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

_LISTENS = "0A"
"""TCP_LISTEN in include/net/tcp_states.h, as /proc/net/tcp has it."""


def listeners(port: int) -> list[int]:
    """Return the pids of the processes that listen on a port, sorted; without rights, those of our user only."""
    found = set()
    with contextlib.suppress(psutil.Error, OSError):
        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port and one.pid is not None:
                found.add(one.pid)
    return sorted(found)


def owners(port: int) -> list[int]:
    """Return the uids of the sockets that listen on a port, sorted; everybody may see these."""
    found = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", name).read_text("ascii").splitlines()[1:]:
                _, local, _, state, _, _, _, uid, *_ = line.split()
                if state == _LISTENS and int(local.rpartition(":")[2], 16) == port:
                    found.add(int(uid))
    return sorted(found)
