"""Client of the daemon's control socket, used by the CLI. Standard library only, blocking."""

from __future__ import annotations

import http.client
import json
import os
import socket
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlencode

from hookd.errors import (
    DaemonNotRunning,
    DaemonSilent,
    HookdError,
    NoSuchTarget,
    PermissionDenied,
    TargetUnsupported,
    UsageError,
)
from hookd.tool.config import default_control_path, host_path
from hookd.wire.peer import peer_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from typing_extensions import Unpack

    from hookd.tool.daemon.incidents.rows import Query
    from hookd.tool.daemon.plugins.rows import DaemonPluginRow
    from hookd.wire.answer import Attached, ChangedTarget, DetachedTarget, EvaluatedTarget, Version
    from hookd.wire.fingerprint import KeptRow
    from hookd.wire.incident import IncidentRow
    from hookd.wire.report import Report
    from hookd.wire.target import ServerStatus, TargetRow

_BY_EXIT_CODE: Mapping[int, type[HookdError]] = {
    kind.exit_code: kind for kind in (UsageError, DaemonNotRunning, NoSuchTarget, PermissionDenied, TargetUnsupported)
}

EMBEDDED_TIMEOUT_S = 5.0
"""Timeout for a foreground attach, which may be suspended."""
EMBEDDED_SOCKET = "attach-{}.sock"
"""File name of the control socket of a foreground attach."""


class DaemonClient:
    """Client of a daemon's control API. Opens a connection per request; thread-safe.

    Args:
        timeout_s: default timeout of a request, in seconds.

    Attributes:
        peer: pid of the process that answered last, in our PID namespace; 0 for a process in another one.
    """

    def __init__(self, path: Path, timeout_s: float = 30.0) -> None:
        self.path = path
        self.timeout_s = timeout_s
        self.peer = 0

    @classmethod
    def of(cls, host: str | None, environ: Mapping[str, str], timeout_s: float = 30.0) -> DaemonClient:
        """Return a client for `--host`, else HOOKD_HOST, else HOOKD_CONTROL, else the default socket of `hookd serve`.

        Raises:
            ConfigError: the host is not a `unix://PATH`.
        """
        host = host or environ.get("HOOKD_HOST") or None
        if host is None and environ.get("HOOKD_CONTROL"):
            host = "unix://" + os.path.abspath(environ["HOOKD_CONTROL"])  # noqa: PTH100  no symlinks resolved
        return cls(host_path(host) if host else default_control_path(environ, os.geteuid()), timeout_s)

    @classmethod
    def embedded(cls, environ: Mapping[str, str]) -> list[DaemonClient]:
        """Return clients for the foreground attaches of this user; their sockets lie beside the default one."""
        folder = default_control_path(environ, os.geteuid()).parent
        return [cls(path, EMBEDDED_TIMEOUT_S) for path in sorted(folder.glob(EMBEDDED_SOCKET.format("*")))]

    def is_running(self) -> bool:
        """Whether a daemon answers.

        Raises:
            PermissionDenied: the socket belongs to another user.
        """
        try:
            self.version()
        except DaemonNotRunning:
            return False
        return True

    def request(self, method: str, path: str, body: object = None, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Send one request and return the JSON object of the response.

        Args:
            method: GET or POST.
            path: such as `/v1/targets`.
            body: sent as JSON.
            timeout_s: timeout in seconds; None for the default.

        Raises:
            DaemonNotRunning: nobody listens on the socket.
            PermissionDenied: the socket belongs to another user.
            DaemonSilent: the daemon took longer than `timeout_s`.
            HookdError: the daemon reported an error, with its own type, reason and hint.
        """
        connection = _Connection(self.path, timeout_s or self.timeout_s)
        try:
            headers = {"Content-Type": "application/json"} if body is not None else {}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            answer = json.loads(response.read())
            self.peer = connection.peer
        except TimeoutError as exc:
            raise connection.silent() from exc
        except (OSError, http.client.HTTPException, ValueError) as exc:
            raise DaemonNotRunning(f"the daemon on {self.path} has closed the connection: {exc}") from exc
        finally:
            connection.close()
        if not isinstance(answer, dict):
            hint = "It may be of another version: end it, and start `hookd serve` of this version."
            raise HookdError(f"the daemon on {self.path} does not speak our protocol", reason="protocol", hint=hint)
        if response.status >= 400:
            raise error_of(answer)
        return answer

    # One method per route.

    def version(self, timeout_s: float | None = None) -> Version:
        """Return the version of the daemon."""
        return cast("Version", self.request("GET", "/v1/version", timeout_s=timeout_s))

    def status(self) -> ServerStatus:
        """Return the daemon's state and a summary of its targets."""
        return cast("ServerStatus", self.request("GET", "/v1/status"))

    def fingerprints(self) -> list[KeptRow]:
        """Return the fingerprints that the daemon keeps, the newest first."""
        return list(self.request("GET", "/v1/fingerprints")["fingerprints"])

    def targets(self, timeout_s: float | None = None) -> list[TargetRow]:
        """Return all targets, including ended ones that linger."""
        return list(self.request("GET", "/v1/targets", timeout_s=timeout_s)["targets"])

    def attach(self, pid: int, *, timeout_s: float = 10.0, **options: object) -> Attached:
        """Attach to a process; `options` are the other keys of `POST /v1/attach`."""
        body = {"pid": pid, "timeout_s": timeout_s, **options}
        return cast("Attached", self.request("POST", "/v1/attach", body, timeout_s=2 * timeout_s + 20))

    def detach(self, pid: int, timeout_s: float = 10.0) -> DetachedTarget:
        """Detach from a process."""
        body = {"pid": pid, "timeout_s": timeout_s}
        return cast("DetachedTarget", self.request("POST", "/v1/detach", body, timeout_s=timeout_s + 20))

    def change_plugins(self, pid: int, op: str, plugin: object, *, timeout_s: float, **more: object) -> ChangedTarget:
        """Load, unload or configure a plugin; see `hookd.tool.attach.change`."""
        body = {"op": op, "plugin": plugin, "timeout_s": timeout_s, **more}
        return cast("ChangedTarget", self.request("POST", f"/v1/targets/{pid}/plugins", body, timeout_s=timeout_s + 60))

    def plugins(self) -> list[DaemonPluginRow]:
        """Return a row for each daemon plugin."""
        return list(self.request("GET", "/v1/plugins")["plugins"])

    def evaluate(self, pid: int, expression: str, timeout_s: float) -> EvaluatedTarget:
        """Evaluate an expression in a target; see `hookd.tool.daemon.evaluate`."""
        body = {"expression": expression, "timeout_s": timeout_s}
        return cast(
            "EvaluatedTarget", self.request("POST", f"/v1/targets/{pid}/eval", body, timeout_s=2 * timeout_s + 30)
        )

    def report(self, pid: int, *, has_curve: bool = False) -> Report:
        """Return the report of a target, with `has_curve` including the times of its last steps."""
        return cast("Report", self.request("GET", f"/v1/targets/{pid}/report" + ("?curve=1" if has_curve else "")))

    def incidents(self, **filters: Unpack[Query]) -> list[IncidentRow]:
        """Return incidents; see `rows.query` for the filters."""
        asked = urlencode({name: value for name, value in filters.items() if value is not None})
        return list(self.request("GET", f"/v1/incidents?{asked}")["incidents"])


def error_of(answer: Mapping[str, Any]) -> HookdError:
    """Return the exception that an error response describes."""
    code = answer.get("exit_code")
    kind = _BY_EXIT_CODE.get(code, HookdError) if isinstance(code, int) else HookdError
    return kind(
        str(answer.get("error", "the daemon refuses")),
        reason=str(answer.get("reason", kind.reason)),
        hint=str(answer.get("hint", "")),
    )


class _Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket whose peer must be our own user or root."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path
        self.peer = 0

    def silent(self) -> DaemonSilent:
        """Return the error for a daemon that accepts connections but does not answer."""
        who = f" (process {self.peer})" if self.peer else ""
        return DaemonSilent(
            f"the daemon on {self._path}{who} does not answer within {self.timeout:g} s",
            hint="It is stopped, hangs or is overloaded: see its log. Its targets continue to train, and a new daemon finds them.",
        )

    def connect(self) -> None:
        """Connect, and check the peer's user: the fallback directory is below the world-writable /tmp."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(self.timeout)
        try:
            connection.connect(str(self._path))
        except PermissionError as exc:
            connection.close()
            raise PermissionDenied(
                f"the daemon's control socket {self._path} is another user's", hint="Ask as that user, or as root."
            ) from exc
        except BlockingIOError as exc:  # the socket's backlog is full
            connection.close()
            raise self.silent() from exc
        except OSError as exc:
            connection.close()
            raise DaemonNotRunning(
                f"no daemon answers on {self._path}: {exc.strerror or exc}",
                hint="Start one with `hookd serve`, or name its socket with --host unix://PATH.",
            ) from exc
        self.peer, uid = peer_of(connection)
        if uid not in (0, os.geteuid()) and os.geteuid() != 0:
            connection.close()
            raise PermissionDenied(
                f"the process that answers on {self._path} belongs to user {uid}", reason="impostor",
                hint=f"Find out what process {self.peer} is before you do anything else.",
            )  # fmt: skip
        self.sock = connection
