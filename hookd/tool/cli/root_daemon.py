"""Find root's daemon, for a user who may not send it requests.

It is found by its process, and its page by a request to its port.
"""

from __future__ import annotations

import contextlib
import http.client
import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from hookd.errors import HookdError
from hookd.tool.config import Address, ServeConfig, default_control_path
from hookd.tool.linux import proc

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hookd.tool.cli.outputs import RootDaemonRow

ANSWER_S = 1.0
"""Timeout of a request to its port."""


@dataclass(frozen=True)
class RootDaemon:
    """A `hookd serve` that runs as root.

    Attributes:
        pid: of its process.
        control: its control socket.
        url: of its page; None if nothing answers at the address in its command line, or it uses TLS.
    """

    pid: int
    control: str
    url: str | None

    def as_json(self) -> RootDaemonRow:
        """Return what `--json` prints."""
        return {"pid": self.pid, "control": self.control, "url": self.url}

    @property
    def description(self) -> str:
        """Its description for a message."""
        where = f"; its page is {self.url}, its metrics {self.url}metrics" if self.url else ""
        return f"root's runs (process {self.pid}, control socket {self.control}) and answers only root{where}"

    @property
    def hint(self) -> str:
        """The hint for a user who is not root."""
        is_default = self.control == str(default_control_path({}, 0))
        where = "" if is_default else f" --host unix://{self.control}"
        read = "Read its page" if self.url else "Ask its operator for the address of its page"
        return f"{read}, or use `sudo hookd status{where}`. `hookd attach` serves your own processes without a daemon."


def find() -> RootDaemon | None:
    """Return root's daemon; None if there is none, or we are root."""
    return None if os.geteuid() == 0 else next(daemons(), None)


def daemons() -> Iterator[RootDaemon]:
    """Yield those daemons of root whose processes are visible."""
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()):  # noqa: PTH208  names alone
        with contextlib.suppress(HookdError, OSError, KeyError, ValueError):
            # Not the owner of /proc/PID: that is root for any process that is not dumpable.
            if proc.status(pid).uid == 0 and (words := _arguments(_cmdline(pid))) is not None:
                control = _option(words, "--control") or str(default_control_path({}, 0))
                yield RootDaemon(pid, control, _url(_option(words, "--listen")))


def _cmdline(pid: int) -> list[str]:
    """Return the command line of a process of root.

    For processes of other users use `proc.words`, since such a read may block forever.
    """
    return Path(f"/proc/{pid}/cmdline").read_text("utf-8", "replace").split("\0")


def _arguments(cmdline: Sequence[str]) -> Sequence[str] | None:
    """Return the arguments of `hookd serve` in a command line; None for any other command."""
    for at, (program, command) in enumerate(pairwise(cmdline[:5])):
        if PurePath(program).name == "hookd" and command == "serve":
            return cmdline[at + 2 :]
    return None


def _option(words: Sequence[str], name: str) -> str | None:
    """Return the value of an option, the last one if it is repeated; None without the option."""
    value = None
    for word, after in pairwise((*words, "")):
        if word == name:
            value = after
        elif word.startswith(f"{name}="):
            value = word.partition("=")[2]
    return value


def _url(listen: str | None) -> str | None:
    """Return the URL of the page, if a hookd of root answers there."""
    address = Address.parse(listen) if listen else ServeConfig().listen
    host = address.host if address.host not in ("0.0.0.0", "::") else "127.0.0.1"  # noqa: S104  compared
    if not any(_is_of_root(line.split(), address.port) for line in _listeners()):
        return None
    connection = http.client.HTTPConnection(host, address.port, timeout=ANSWER_S)
    try:
        connection.request("GET", "/-/healthy")
        is_hookd = connection.getresponse().headers.get("Server") == "hookd"
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return f"http://{Address(host, address.port)}/" if is_hookd else None


def _listeners() -> Iterator[str]:
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            yield from Path("/proc/net", name).read_text().splitlines()[1:]


def _is_of_root(fields: Sequence[str], port: int) -> bool:
    """Whether a line of /proc/net/tcp is a listening socket of root on a port."""
    return fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port and fields[7] == "0"
