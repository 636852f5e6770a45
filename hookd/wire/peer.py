"""The process at the other end of a Unix socket, according to the kernel."""

from __future__ import annotations

import _socket
import struct
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:

    class HasOptions(Protocol):
        """A socket of either kind, `_socket.socket` or `socket.socket`."""

        def getsockopt(self, level: int, option: int, size: int, /) -> bytes: ...  # noqa: D102


class Peer(NamedTuple):
    """The process that has connected or, for a socket pair, created it; its pid is 0 if it is in another PID namespace."""

    pid: int
    uid: int


def peer_of(sock: HasOptions) -> Peer:
    """Return the peer of a Unix socket.

    Source: `struct ucred` in include/linux/socket.h, three 32-bit numbers; the third is the gid.
    """
    pid, uid, _ = struct.unpack("iII", sock.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12))
    return Peer(pid, uid)
