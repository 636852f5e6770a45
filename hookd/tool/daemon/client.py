"""Talk to a daemon over its control socket: what the CLI uses. Stdlib only, blocking."""

from __future__ import annotations

import http.client
import json
import os
import socket
import struct
from typing import TYPE_CHECKING, Any
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

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_BY_EXIT_CODE: Mapping[int, type[HookdError]] = {
    kind.exit_code: kind for kind in (UsageError, DaemonNotRunning, NoSuchTarget, PermissionDenied, TargetUnsupported)
}

EMBEDDED_TIMEOUT_S = 5.0
"""How long a foreground attach may take to answer: it may be stopped."""
EMBEDDED_SOCKET = "attach-{}.sock"
"""The name of its control socket."""


class DaemonClient:
    """A daemon's control API. Connects anew for each request; usable from several threads.

    Args:
        path: the control socket.
        timeout_s: how long a request may take that says nothing else.

    Attributes:
        peer: the pid of the process that has answered last, as the kernel tells it here; 0 for one of another PID namespace.
    """

    def __init__(self, path: Path, timeout_s: float = 30.0) -> None:
        self.path = path
        self.timeout_s = timeout_s
        self.peer = 0

    @classmethod
    def of(cls, host: str | None, environ: Mapping[str, str], timeout_s: float = 30.0) -> DaemonClient:
        """Find the daemon: `--host`, else HOOKD_HOST, else HOOKD_CONTROL, else where `hookd serve` listens by default.

        Raises:
            ConfigError: the host is no `unix://PATH`.
        """
        host = host or environ.get("HOOKD_HOST") or None
        if host is None and environ.get("HOOKD_CONTROL"):
            host = "unix://" + os.path.abspath(environ["HOOKD_CONTROL"])  # noqa: PTH100  no symlinks resolved
        return cls(host_path(host) if host else default_control_path(environ, os.geteuid()), timeout_s)

    @classmethod
    def embedded(cls, environ: Mapping[str, str]) -> list[DaemonClient]:
        """Find the daemons inside the foreground attaches of this user, by their sockets beside the default one."""
        folder = default_control_path(environ, os.geteuid()).parent
        return [cls(path, EMBEDDED_TIMEOUT_S) for path in sorted(folder.glob(EMBEDDED_SOCKET.format("*")))]

    def is_running(self) -> bool:
        """Tell whether a daemon answers.

        Raises:
            PermissionDenied: one may be there, but it is not ours to ask.
        """
        try:
            self.version()
        except DaemonNotRunning:
            return False
        return True

    def request(self, method: str, path: str, body: object = None, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Send one request and give the object in its answer.

        Args:
            method: GET or POST.
            path: as `/v1/targets`.
            body: sent as JSON.
            timeout_s: how long to wait for the answer.

        Raises:
            DaemonNotRunning: nobody listens on the socket.
            PermissionDenied: the socket is another user's.
            DaemonSilent: it took longer than `timeout_s`.
            HookdError: what the daemon reports: kind, reason and hint are its own.
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
            raise HookdError(f"the daemon on {self.path} does not speak our protocol", reason="protocol")
        if response.status >= 400:
            raise error_of(answer)
        return answer

    # What the routes are, in words.

    def version(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Give `version`, `pid` and `protocol` of the daemon."""
        return self.request("GET", "/v1/version", timeout_s=timeout_s)

    def status(self) -> dict[str, Any]:
        """Give the daemon's own state, and its targets in short."""
        return self.request("GET", "/v1/status")

    def targets(self, timeout_s: float | None = None) -> list[dict[str, Any]]:
        """Give all targets, those that linger too."""
        return list(self.request("GET", "/v1/targets", timeout_s=timeout_s)["targets"])

    def attach(self, pid: int, *, timeout_s: float = 10.0, **options: Any) -> dict[str, Any]:
        """Attach to a process; `options` are the other keys of `POST /v1/attach`."""
        return self.request(
            "POST", "/v1/attach", {"pid": pid, "timeout_s": timeout_s, **options}, timeout_s=2 * timeout_s + 20
        )

    def detach(self, pid: int, timeout_s: float = 10.0) -> dict[str, Any]:
        """Detach from a process."""
        return self.request("POST", "/v1/detach", {"pid": pid, "timeout_s": timeout_s}, timeout_s=timeout_s + 20)

    def detach_all(self, timeout_s: float = 10.0) -> dict[str, Any]:
        """Detach from all targets; each has its own result under `results`."""
        return self.request("POST", "/v1/detach", {"all": True, "timeout_s": timeout_s}, timeout_s=timeout_s + 60)

    def change_plugins(self, pid: int, op: str, plugin: object, *, timeout_s: float, **more: Any) -> dict[str, Any]:
        """Load, unload or configure a plugin; see `hookd.tool.attach.change`."""
        body = {"op": op, "plugin": plugin, "timeout_s": timeout_s, **more}
        return self.request("POST", f"/v1/targets/{pid}/plugins", body, timeout_s=timeout_s + 60)

    def plugins(self) -> list[dict[str, Any]]:
        """Describe the plugins that run in the daemon itself."""
        return list(self.request("GET", "/v1/plugins")["plugins"])

    def evaluate(self, pid: int, expression: str, timeout_s: float) -> dict[str, Any]:
        """Evaluate an expression in a target; see `hookd.tool.daemon.evaluate`."""
        body = {"expression": expression, "timeout_s": timeout_s}
        return self.request("POST", f"/v1/targets/{pid}/eval", body, timeout_s=2 * timeout_s + 30)

    def report(self, pid: int, *, has_curve: bool = False) -> dict[str, Any]:
        """Give the report of a target, with the times of its last steps if asked for."""
        return self.request("GET", f"/v1/targets/{pid}/report" + ("?curve=1" if has_curve else ""))

    def incidents(self, **wanted: Any) -> list[dict[str, Any]]:
        """Give incidents; see `rows.query` for what may be asked."""
        asked = urlencode({name: value for name, value in wanted.items() if value is not None})
        return list(self.request("GET", f"/v1/incidents?{asked}")["incidents"])


def error_of(answer: Mapping[str, Any]) -> HookdError:
    """Make the exception again that the other side has written down."""
    code = answer.get("exit_code")
    kind = _BY_EXIT_CODE.get(code, HookdError) if isinstance(code, int) else HookdError
    return kind(
        str(answer.get("error", "the daemon refuses")),
        reason=str(answer.get("reason", kind.reason)),
        hint=str(answer.get("hint", "")),
    )


class _Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket whose other end is ours or root's."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path
        self.peer = 0

    def silent(self) -> DaemonSilent:
        """Say that there is a daemon, and that nothing comes from it."""
        who = f" (process {self.peer})" if self.peer else ""
        return DaemonSilent(
            f"the daemon on {self._path}{who} does not answer within {self.timeout:g} s",
            hint="It is stopped, hangs or has too much to do: see its log. Its targets train on, and one that is started in "
            "its place finds them.",
        )

    def connect(self) -> None:
        """Connect, and check who is there: the fallback for a runtime directory lies among everybody's files."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(self.timeout)
        try:
            connection.connect(str(self._path))
        except PermissionError as exc:
            connection.close()
            raise PermissionDenied(
                f"the daemon's control socket {self._path} is another user's", hint="Ask as that user, or as root."
            ) from exc
        except BlockingIOError as exc:  # more wait for it already than its socket lets wait
            connection.close()
            raise self.silent() from exc
        except OSError as exc:
            connection.close()
            raise DaemonNotRunning(
                f"no daemon answers on {self._path}: {exc.strerror or exc}",
                hint="Start one with `hookd serve`, or name its socket with --host unix://PATH.",
            ) from exc
        self.peer, uid, _ = peer_credentials(connection)
        if uid not in (0, os.geteuid()) and os.geteuid() != 0:
            connection.close()
            raise PermissionDenied(f"the process that answers on {self._path} belongs to user {uid}", reason="impostor")
        self.sock = connection


def peer_credentials(connection: socket.socket) -> tuple[int, int, int]:
    """Give pid, uid and gid of the other end of a Unix socket, as the kernel knows them."""
    pid, uid, gid = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid, gid
