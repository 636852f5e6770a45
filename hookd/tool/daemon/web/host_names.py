"""The host names to which a daemon answers, as a protection against DNS rebinding.

A browser sends the name of the page's site as `Host`. An IP address there is the one it connected to, which cannot be
rebound, so addresses need no list.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import re
import socket
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

_LOOPBACK = frozenset({"localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback"})
_HOST = re.compile(r"(?:\[(?P<v6>[0-9a-f:.]+(?:%\w+)?)\]|(?P<name>[a-z0-9_.-]+))(?::\d*)?\Z")
_RESOLVER = Path("/etc/resolv.conf")
_MAX_REPORTED = 16
_log = logging.getLogger(__name__)


class HostNames:
    """Decides whether a daemon answers to the name in a request.

    Args:
        allowed: patterns of additional names, such as `*.example.org`.
        is_local: whether the daemon listens on loopback only; then only the loopback names are its own.
    """

    def __init__(self, allowed: Collection[str] = (), *, is_local: bool) -> None:
        self._allowed = [*_LOOPBACK, *(pattern.lower().rstrip(".") for pattern in allowed)]
        if not is_local:
            self._allowed += _own_names()
        self._is_local = is_local
        self._reported: set[str] = set()

    def refusal(self, host: str) -> str | None:
        """Return the reason for refusing a `Host` header, and what to do; None if it is accepted."""
        match = _HOST.match(host.lower())
        name = (match["v6"] or match["name"]).rstrip(".") if match is not None else host
        if self._is_known(name):
            return None
        if match is None:
            return "the Host header contains neither a name nor an address\n"
        said = self._message(name)
        if name not in self._reported and len(self._reported) < _MAX_REPORTED:
            self._reported.add(name)
            _log.warning("%s (docs/security.md)", said)
        return f"{said}\n"

    def _message(self, name: str) -> str:
        """Return the message: which names are accepted, and which option adds this one."""
        allow = f'start hookd with --allow-host {name}, or write allow_hosts = ["{name}"] under [serve] of its configuration'
        if self._is_local:
            known = "it listens on loopback alone, so ask for localhost or 127.0.0.1"
            return f"hookd does not answer to {name}: {known}. Behind a tunnel or proxy that keeps this name, {allow}"
        known = "ask for an address of this machine"
        return f"hookd does not answer to {name}: {known}. If that is a name of this machine, {allow}"

    def _is_known(self, name: str) -> bool:
        with contextlib.suppress(ValueError):
            address = ipaddress.ip_address(name)
            if address.is_loopback or not self._is_local:
                return True
        return any(fnmatchcase(name, pattern) for pattern in self._allowed)


def _own_names() -> set[str]:
    """Return this machine's host name, alone and in the resolver's search domains, without a name service query."""
    name = socket.gethostname().lower()
    short = name.partition(".")[0]
    with contextlib.suppress(OSError, UnicodeDecodeError):
        lines = [line.split() for line in _RESOLVER.read_text().lower().splitlines()]
        domains = [word.rstrip(".") for line in lines if line[:1] in (["search"], ["domain"]) for word in line[1:]]
        return {name, short, *(f"{short}.{domain}" for domain in domains if domain)} - {""}
    return {name, short} - {""}
