"""Explain an address in use: who listens there, and the command that uses another."""

from __future__ import annotations

import contextlib
import shlex
import sys
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from hookd.errors import HookdError
from hookd.tool.cli import targets
from hookd.tool.linux import proc
from hookd.tool.linux.owner import user_name
from hookd.tool.reports.wording import process_of, shorten

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookd.tool.config.values import Address

ANY_PORT = ("--listen", "127.0.0.1:0")
_WIDTH = 80
"""Characters of a command line; the pid leads to the whole."""


@contextlib.contextmanager
def explaining(listen: Address, command: str) -> Iterator[None]:
    """Add to an address-in-use error of the block which hookd, or which other process, listens there.

    Args:
        listen: the address.
        command: the subcommand of `hookd` that this process runs.
    """
    try:
        yield
    except HookdError as error:
        if error.reason != "address-in-use":
            raise
        message = ": ".join(filter(None, [error.message, _holder(listen.port)]))
        raise type(error)(message, reason=error.reason, hint=_elsewhere(command) or error.hint) from error


def _holder(port: int) -> str:
    """Describe who listens on a port, as far as this user may see it; "" if that is nobody."""
    from hookd.tool.linux import ports

    if daemons := [name for name, its_port in _ports() if its_port == port]:
        return f"{', '.join(daemons)} serves there"
    if programs := [_program(pid) for pid in ports.listeners(port)]:
        return f"{', '.join(programs)} listens there"
    if users := [user_name(uid) for uid in ports.owners(port)]:
        return f"a process of user {', '.join(users)} listens there; root can see which: ss -tlnp 'sport = :{port}'"
    return ""


def _program(pid: int) -> str:
    try:
        user, command = user_name(proc.status(pid).uid), shlex.join(proc.words(pid, "cmdline"))
    except (HookdError, OSError):  # it has just ended
        return f"process {pid}"
    return f"{process_of(pid, user)} ({shorten(command, _WIDTH)})"


def _ports() -> Iterator[tuple[str, int | None]]:
    client = None
    with contextlib.suppress(HookdError):
        client = targets.daemon(None)
    for server in targets.servers(client):
        yield targets.command_of(server["pid"]), urlsplit(server["url"]).port


def _elsewhere(command: str) -> str:
    """Return this command with another address, "" if it names an address itself."""
    words = sys.argv[1:]
    if command not in words or any(word.startswith("--listen") for word in words):
        return ""
    at = words.index(command) + 1
    return shlex.join(["hookd", *words[:at], *ANY_PORT, *words[at:]])
