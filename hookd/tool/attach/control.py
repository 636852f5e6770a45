"""Talk to an agent over its control socket. An open connection is a lease."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import socket
import threading
import time
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, cast

from hookd.errors import ControlError, HookdError, NoSuchTarget, rebuild
from hookd.tool.attach import discover
from hookd.tool.linux import bounded, permission, proc
from hookd.wire.peer import peer_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from typing_extensions import Self

    from hookd.wire.agent import AgentStatus, Detached

_MAX_ANSWER = 16 << 20
_SOCKET_NAME = re.compile(r"hookd-\d+-[0-9a-f]{12}\.sock")


class Control:
    """A connection to the agent in a process.

    Requests are answered in order. Thread-safe.

    Args:
        connection: connected to the agent.
        pid: the process, for messages.
    """

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection = connection
        self._timeout_s = connection.gettimeout()
        self._received = bytearray()
        self._lock = threading.Lock()
        self.pid = pid

    @classmethod
    def connect(cls, pid: int, timeout_s: float = 10.0) -> Control:
        """Connect to the agent in process `pid`.

        Raises:
            NoSuchTarget: reason "not-attached", or no such process.
            PermissionDenied: reason "other-user" and the like.
            ControlError: it does not answer, or another process does.
        """
        try:
            identity = discover.identity(pid)
        except PermissionError as exc:
            raise permission.explain(pid, exc) from exc
        if identity is None:
            raise NoSuchTarget(f"no agent in process {pid}", reason="not-attached", hint=f"Run `hookd attach {pid}`.")
        return cls(_open(pid, str(identity.get("control", "")), timeout_s), pid)

    def request(
        self, op: str, *, timeout_s: float | None = None, fds: Sequence[int] = (), **arguments: Any
    ) -> dict[str, Any]:
        """Send one request, with copies of descriptors, and return the answer.

        Raises:
            HookdError: the agent refuses; the class and reason are the agent's. ControlError, reason "gone": it is gone.
        """
        with self._lock:
            try:
                if timeout_s is not None:
                    self._timeout_s = timeout_s
                deadline = self._deadline()
                line = json.dumps({"op": op, **arguments}).encode() + b"\n"
                sent = socket.send_fds(self._connection, [line], fds) if fds else 0
                self._connection.sendall(line[sent:])
                line = self._line(deadline)
            except OSError as exc:
                raise ControlError(
                    f"the agent in process {self.pid} does not answer: {exc}",
                    reason="gone",
                    hint=_why_silent(self.pid),
                ) from exc
        return self._read(line)

    def status(self) -> AgentStatus:
        """Return the agent's status, which may lack keys if the agent is of another version; raises what `request` does.

        Of its values, `plugins` and `holders` are checked.
        """
        status = self.request("status")
        rows, holders = status.get("plugins", []), status.get("holders", [])
        if not (isinstance(rows, list) and all(map(_is_plugin, rows)) and isinstance(holders, list)):
            raise foreign(self.pid)
        return cast("AgentStatus", status)

    def wait_closed(self) -> None:
        """Wait until the agent has closed the connection, at most for the timeout of the last request."""
        deadline = self._deadline()
        with contextlib.suppress(OSError):
            while self._line(deadline):
                pass

    def _deadline(self) -> float:
        """Return the deadline of a whole answer.

        With a timeout per read, a target could prolong the wait byte by byte.
        """
        self._connection.settimeout(self._timeout_s)
        return math.inf if self._timeout_s is None else time.monotonic() + self._timeout_s

    def _line(self, deadline: float) -> bytes:
        """Receive a line; without a newline if the connection was closed or the line is too long.

        Raises:
            OSError: the line does not arrive in time.
        """
        searched = 0
        while (end := self._received.find(b"\n", searched)) < 0 and len(self._received) < _MAX_ANSWER:
            searched = len(self._received)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("timed out")
            self._connection.settimeout(None if left_s == math.inf else left_s)
            data = self._connection.recv(1 << 16)
            if not data:
                break
            self._received += data
        size = end + 1 if end >= 0 else len(self._received)
        line = bytes(self._received[:size])
        del self._received[:size]
        return line

    def close(self) -> None:
        """Close the connection, and with it a lease. May be called twice."""
        self._connection.close()

    def _read(self, line: bytes) -> dict[str, Any]:
        if not line.endswith(b"\n"):
            raise ControlError(f"the agent in process {self.pid} has closed the connection", reason="gone")
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError) as exc:
            raise foreign(self.pid) from exc
        if not isinstance(answer, dict):
            raise foreign(self.pid)
        if not answer.get("ok"):
            message, reason = str(answer.get("error", "refused")), str(answer.get("reason", "control"))
            raise rebuild(answer.get("kind"), message, reason, answer.get("hint", ""), ControlError)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _is_plugin(row: object) -> bool:
    return isinstance(row, dict) and isinstance(row.get("name"), str) and isinstance(row.get("options") or {}, dict)


def _why_silent(pid: int) -> str:
    """Return a hint why an agent does not answer, as far as visible from outside, else ""."""
    try:
        state = proc.status(pid).state
    except (HookdError, OSError, LookupError, ValueError):
        return ""
    if state == "T":
        return f"The process is stopped, and so is its agent; `kill -CONT {pid}` resumes it."
    return "A debugger holds the process." if state == "t" else ""


def path(pid: int, control: str) -> Path:
    """Return the agent's socket as a path for this process; a socket without a file as `@…`."""
    return Path(control) if control.startswith("@") else Path(f"/proc/{pid}/root{control}")


def remove_dead(control: str, uid: int, near: int | None = None) -> bool | None:
    """Remove the stale socket file of a killed target.

    The target controls the path. So only a socket with a name that an agent creates is removed, if it belongs to the target's user
    and no process listens on it. No link is followed.

    Args:
        control: the path, as the target reported it.
        uid: owner of the file.
        near: a process in the target's mount namespace, because the target itself is gone; by default this process.

    Returns:
        Whether the file was removed; None if the check timed out.
    """
    path = PurePosixPath(control)
    if not _SOCKET_NAME.fullmatch(path.name) or ".." in path.parts or not path.is_absolute():
        return False
    try:
        return bounded.remove_dead(near or os.getpid(), control, uid)
    except HookdError:  # timed out
        return None
    except OSError:
        return False


def _open(pid: int, control: str, timeout_s: float) -> socket.socket:
    """Connect in the way that the agent's page specifies: see `hookd/target/remote/endpoint.py`."""
    try:
        connection = _through_pair(pid, control) if control.startswith("@") else _to_file(pid, control, timeout_s)
    except PermissionError as exc:
        raise permission.explain(pid, exc) from exc
    except (OSError, ValueError) as exc:
        hint = "It may be detaching; look again with `hookd ps`."
        raise ControlError(f"the agent in process {pid} cannot be reached: {exc}", reason="gone", hint=hint) from exc
    connection.settimeout(timeout_s)
    return connection


def _to_file(pid: int, control: str, timeout_s: float) -> socket.socket:
    """Connect below the target's root, and check that the target itself answers, because it controls the path.

    The connection goes through the directory, because the length of a socket's address is limited. Links are not followed: they
    would lead into our own root.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        bounded.connect(connection, pid, control, proc.status(pid).uid)
        _require_peer(peer_of(connection).pid, pid)
    except BaseException:
        connection.close()
        raise
    return connection


def foreign(pid: int) -> ControlError:
    """Return the error for an answer that an agent of this version does not give."""
    hint = f"It may be of another version: `hookd attach {pid}` replaces an older agent."
    return ControlError(f"the agent in process {pid} does not speak our protocol", reason="protocol", hint=hint)


@contextlib.contextmanager
def reading(pid: int) -> Iterator[None]:
    """Raise `foreign` if an answer that is read in the block lacks a value, or has one of another type."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as exc:
        raise foreign(pid) from exc


def _require_peer(peer: int, pid: int) -> None:
    if peer != pid:
        hint = f"Find out what process {peer} is before you do anything else."
        raise ControlError(f"process {peer} answers for process {pid}", reason="impostor", hint=hint)


def _through_pair(pid: int, control: str) -> socket.socket:
    """Send one end of a new connection through the target's outer socket, of which this process has no copy."""
    number, inode = map(int, control[1:].split(":"))
    if not 0 <= number < 1 << 31 or not 0 <= inode < 1 << 63:
        raise ValueError(f"{control} is not a descriptor and its inode")
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            _require_peer(bounded.send_through_pair(pid, number, inode, theirs), pid)
        except BaseException:
            ours.close()
            raise
    return ours


def detach(pid: int, timeout_s: float = 10.0) -> Detached:
    """Detach the agent from process `pid`, and wait until it is gone.

    Returns:
        The agent's answer: `restored` and `residue`.

    Raises:
        NoSuchTarget: reason "not-attached", or no such process.
        ControlError: it does not detach.
    """
    proc.status(pid)
    with Control.connect(pid, timeout_s) as control:
        answer = cast("Detached", control.request("detach", timeout=timeout_s, timeout_s=timeout_s + 5))
        control.wait_closed()
    if answer.get("restored") != "pending":
        discover.wait_left(pid, timeout_s)
    return answer
