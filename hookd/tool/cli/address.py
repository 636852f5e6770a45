"""Explain an address in use: which hookd serves there, and the command that uses another."""

from __future__ import annotations

import contextlib
import shlex
import sys
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from hookd.errors import HookdError
from hookd.tool.cli import targets

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookd.tool.config.values import Address

ANY_PORT = ("--listen", "127.0.0.1:0")


@contextlib.contextmanager
def explaining(listen: Address, command: str) -> Iterator[None]:
    """Add to an address-in-use error of the block which hookd serves there.

    Args:
        listen: the address.
        command: the subcommand of `hookd` that this process runs.
    """
    try:
        yield
    except HookdError as error:
        if error.reason != "address-in-use":
            raise
        who = [name for name, port in _ports() if port == listen.port]
        message = error.message + (f": {', '.join(who)} serves there" if who else "")
        raise type(error)(message, reason=error.reason, hint=_elsewhere(command) or error.hint) from error


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
