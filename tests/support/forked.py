"""Processes of `forkserver.py`, to be used as those of `subprocess.Popen` are."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tests.support.environment import bare_python, once, target_environment, tool_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    _Server = tuple[socket.socket, subprocess.Popen[bytes]]

READ_AT_START = ("LANG", "LC_", "LD_", "OMP_", "PYTHON")
"""How variables begin that Python, the loader or torch read once, as they start."""
_asking = threading.Lock()


def start(
    command: Sequence[str], *, env: Mapping[str, str], cwd: str | Path | None, stdin: int, **streams: Any
) -> Popen | subprocess.Popen[str]:
    """Fork a process with finished imports: those of the targets, with torch, or those of a `hookd` command.

    It is started normally if a variable changes Python, the loader or torch in another way than in the server.

    Args:
        command: the interpreter of the targets' environment or, for code that needs hookd, this one; and its arguments.
        env: its environment.
        cwd: its working directory.
        stdin: `subprocess.PIPE` or `subprocess.DEVNULL`.
        streams: the other arguments of `subprocess.Popen`.
    """
    is_tool = command[0] == sys.executable
    assert is_tool or command[0] == str(bare_python()), f"no server forks this: {command}"
    usual = tool_environment() if is_tool else target_environment()
    if _at_start(env) != _at_start(usual):
        return subprocess.Popen(command, env=env, cwd=cwd, stdin=stdin, **streams)
    return Popen(_commands if is_tool else _targets, command, env, cwd, stdin)


def _at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(READ_AT_START)}


class Popen:
    """A process of a server.

    Args:
        serve: returns the server.
        command: the interpreter and its arguments: a script, `-m` and a module, or `-c` and code, and theirs.
        env: its environment.
        cwd: where it runs.
        stdin: `subprocess.PIPE` or `subprocess.DEVNULL`; its stdout and stderr are pipes of text.
    """

    def __init__(
        self,
        serve: Callable[[], _Server],
        command: Sequence[str],
        env: Mapping[str, str],
        cwd: str | Path | None,
        stdin: int,
    ) -> None:
        task = {"command": [str(part) for part in command], "env": dict(env), "cwd": str(cwd or Path.cwd())}
        with contextlib.ExitStack() as theirs:
            into = _pipe(theirs, theirs_reads=True) if stdin == subprocess.PIPE else None
            out, err, status = (_pipe(theirs, theirs_reads=False) for _ in range(3))
            given = into[0] if into else theirs.enter_context(open(os.devnull)).fileno()
            with _asking:
                server, _ = serve()
                socket.send_fds(server, [json.dumps(task).encode()], [given, out[0], err[0], status[0]])
                answer, (self._pidfd,), _, _ = socket.recv_fds(server, 64, 1)
        self.pid = int(answer)
        self.returncode: int | None = None
        self.stdin: IO[str] | None = into[1] if into else None
        self.stdout, self.stderr, self._status = out[1], err[1], status[1]

    def poll(self) -> int | None:
        """Return the exit status, None while it runs."""
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status.

        Raises:
            subprocess.TimeoutExpired: there is none yet.
        """
        status = self._look(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return status

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            self.returncode = int(
                self._status.read() or -signal.SIGKILL
            )  # nothing: the server has gone, and all its children
            self._status.close()
            os.close(self._pidfd)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Signal it, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


def _pipe(theirs: contextlib.ExitStack, *, theirs_reads: bool) -> tuple[int, IO[str]]:
    """Return the descriptor of the other's end, closed with `theirs`, and our end as a file."""
    reads, writes = os.pipe()
    their_end, ours = (reads, writes) if theirs_reads else (writes, reads)
    theirs.callback(os.close, their_end)
    return their_end, open(ours, "w" if theirs_reads else "r", errors="replace")  # noqa: SIM115 - the caller closes it


@once
def _targets() -> _Server:
    return _serve(str(bare_python()), target_environment(), "numpy", "torch", "torch._dynamo")


@once
def _commands() -> _Server:
    return _serve(sys.executable, tool_environment(), "hookd.tool.*", "rich.table", "rich.text")


def _serve(python: str, env: Mapping[str, str], *modules: str) -> _Server:
    """Start a server that has imported these modules; it ends with our end of its socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        script = Path(__file__).with_name("forkserver.py")
        command = [python, script, str(theirs.fileno()), *modules]
        process = subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    return ours, process
