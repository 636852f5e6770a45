"""The control API: HTTP and JSON on a Unix socket, for the same user and root only. All operations that change state.

    GET  /v1/version                   {"version", "pid", "protocol"}
    GET  /v1/status                    {"version", "pid", "url", "control", "started", "is_embedded", "targets": [row…]}
    GET  /v1/plugins                   {"plugins": [row…]}: the daemon plugins, see `plugins.host.Host.rows`
    GET  /v1/targets                   {"targets": [row…]}
    POST /v1/attach                    {"pid", "plugins"?, "timeout_s"?, "keep"?, "force"?, "run"?, "plugin_dirs"?,
                                        "only_trainers"?}
    POST /v1/detach                    {"pid"} or {"all": true}, "timeout_s"?
    GET  /v1/targets/PID/report        ?curve=1   see `describe.target_report`
    POST /v1/targets/PID/plugins       {"op": "load" | "unload" | "reload" | "configure", "plugin": "NAME:key=value,…" or object,
                                        "timeout_s"?, "plugin_dirs"?}; a plugin that changes the training: in all ranks of the job
    POST /v1/targets/PID/eval          {"expression", "timeout_s"?}; where [eval] allow = true, see `evaluate.evaluate`
    GET  /v1/incidents                 ?run= &pid= &user= &kind= &since= &limit= &id= &after= &order=
                                        {"incidents": [row…]}, see `rows.query`; `user` is a uid
    GET  /v1/fingerprints              {"fingerprints": [row…]}: those that are kept, the newest first

An error is {"error", "reason", "hint", "exit_code"} with a status of 400 or above.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import stat
import time
from typing import TYPE_CHECKING, Any, cast

from aiohttp import web

from hookd.errors import (
    AttachError,
    HookdError,
    NoSuchTarget,
    PageError,
    PermissionDenied,
    TargetUnsupported,
    UsageError,
    worded,
)
from hookd.tool.daemon import describe
from hookd.tool.daemon.actions import Order, read_timeout
from hookd.tool.daemon.client import EMBEDDED_SOCKET
from hookd.tool.daemon.directories import make_private
from hookd.wire.peer import peer_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from hookd.tool.daemon.incidents.rows import Query
    from hookd.tool.daemon.service import Service
    from hookd.wire.agent import Caller
    from hookd.wire.peer import Peer

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_BODY = 1 << 20
STARTING_S = 60.0
"""A socket file younger than this may belong to a process that does not listen yet."""
_STATUS: dict[type[HookdError], int] = {
    UsageError: 400,
    PermissionDenied: 403,
    NoSuchTarget: 404,
    TargetUnsupported: 422,
    AttachError: 409,
    PageError: 409,
}
_log = logging.getLogger(__name__)


class Api:
    """The routes of the control socket."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def app(self) -> web.Application:
        """Return the application with all routes."""
        app = web.Application(middlewares=[_answer_errors, _require_own_user], client_max_size=MAX_BODY)
        app.router.add_get("/v1/version", self._version)
        app.router.add_get("/v1/status", self._status)
        app.router.add_get("/v1/targets", self._targets)
        app.router.add_get("/v1/plugins", self._daemon_plugins)
        app.router.add_get(r"/v1/targets/{pid:\d+}/report", self._report)
        app.router.add_get("/v1/incidents", self._incidents)
        app.router.add_get("/v1/fingerprints", self._fingerprints)
        app.router.add_post("/v1/attach", self._attach)
        app.router.add_post("/v1/detach", self._detach)
        app.router.add_post(r"/v1/targets/{pid:\d+}/plugins", self._plugins)
        app.router.add_post(r"/v1/targets/{pid:\d+}/eval", self._eval)
        return app

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response(describe.daemon_version())

    async def _status(self, _: web.Request) -> web.Response:
        return web.json_response(self._service.status())

    async def _targets(self, _: web.Request) -> web.Response:
        return web.json_response({"targets": self._service.rows()})

    async def _daemon_plugins(self, _: web.Request) -> web.Response:
        return web.json_response({"plugins": self._service.plugins.rows()})

    async def _report(self, request: web.Request) -> web.Response:
        pid, has_curve = _pid(request.match_info["pid"]), request.query.get("curve") == "1"
        return web.json_response(await asyncio.to_thread(self._service.report, pid, has_curve=has_curve))

    async def _incidents(self, request: web.Request) -> web.Response:
        filters = incident_filter(request)
        return web.json_response({"incidents": await asyncio.to_thread(self._service.fleet.incidents, **filters)})

    async def _fingerprints(self, _: web.Request) -> web.Response:
        kept = await asyncio.to_thread(self._service.fingerprints.every)
        return web.json_response({"fingerprints": [one.row() for one in kept]})

    async def _attach(self, request: web.Request) -> web.Response:
        body = await _body(request)
        answer = await self._service.attach(_pid(body.get("pid")), Order.from_json(body), _caller(request))
        return web.json_response(answer)

    async def _detach(self, request: web.Request) -> web.Response:
        body = await _body(request)
        timeout_s, by = read_timeout(body), _caller(request)
        if body.get("all") is True:
            return web.json_response({"results": await self._service.detach_all(timeout_s, by)})
        return web.json_response(await self._service.detach(_pid(body.get("pid")), timeout_s, by))

    async def _plugins(self, request: web.Request) -> web.Response:
        pid, body = _pid(request.match_info["pid"]), await _body(request)
        return web.json_response(await self._service.change_plugins(pid, body, _caller(request)))

    async def _eval(self, request: web.Request) -> web.Response:
        pid, body = _pid(request.match_info["pid"]), await _body(request)
        return web.json_response(await self._service.evaluate(pid, body, _caller(request)))


def incident_filter(request: web.Request) -> Query:
    """Return the query parameters as arguments for the incident store.

    Raises:
        UsageError: a parameter is unknown, or not a number where one is required.
    """
    kinds: dict[str, Callable[[str], Any]] = {
        "run": str, "pid": int, "user": int, "kind": str, "since": float, "limit": int, "id": int, "after": int,
        "order": str,
    }  # fmt: skip
    filters: dict[str, object] = {}
    for key, text in request.query.items():
        try:
            filters[key] = kinds[key](text)
        except (KeyError, ValueError) as exc:  # noqa: PERF203  a query has a handful of keys
            raise UsageError(f"the query's '{key}' is unknown or has the wrong type", reason="bad-request") from exc
    return cast("Query", filters)


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except HookdError as exc:
        status = next((code for kind, code in _STATUS.items() if isinstance(exc, kind)), 500)
        return web.json_response(exc.as_json(), status=status)
    except web.HTTPException as exc:
        error: HookdError = UsageError(f"{request.method} {request.path}: {exc.reason}", reason="bad-request")
        return web.json_response(error.as_json(), status=exc.status)
    except Exception as exc:  # noqa: BLE001  a bug must not look like a daemon that is not running
        _log.exception("%s %s", request.method, request.path)
        error = HookdError(f"the daemon failed: {worded(exc)}", reason="internal")
        return web.json_response(error.as_json(), status=500)


@web.middleware
async def _require_own_user(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Reject peers other than root and the daemon's own user, even if the socket's mode was changed."""
    peer = _peer(request)
    if peer is None or peer.uid not in (0, os.geteuid()):
        raise PermissionDenied("this daemon belongs to another user", reason="other-user")
    return await handler(request)


def _caller(request: web.Request) -> Caller:
    """Return the caller's credentials according to the kernel.

    Raises:
        PermissionDenied: the caller has disconnected.
    """
    peer = _peer(request)
    if peer is None:
        raise PermissionDenied("the caller has disconnected", reason="other-user")
    return {"pid": peer.pid, "uid": peer.uid}


def _peer(request: web.Request) -> Peer | None:
    connection = request.transport.get_extra_info("socket") if request.transport is not None else None
    return None if connection is None else peer_of(connection)


async def _body(request: web.Request) -> dict[str, object]:
    try:
        body = json.loads(await request.read())  # UTF-8, whatever charset the headers name
    except (ValueError, RecursionError) as exc:
        raise UsageError("the request's body is not valid JSON", reason="bad-request") from exc
    except (ConnectionError, web.RequestPayloadError) as exc:  # the caller disconnected, or sent invalid HTTP
        raise UsageError("the request's body is incomplete", reason="bad-request") from exc
    if not isinstance(body, dict):
        raise UsageError("the request's body is not a JSON object", reason="bad-request")
    return body


def _pid(value: object) -> int:
    if isinstance(value, str) and value.isdecimal() and len(value) < 10:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
        raise UsageError("the request has no valid pid", reason="bad-request")
    return value


def bind(path: Path) -> socket.socket:
    """Bind the control socket with mode 0600 from the start, in a directory of our own.

    A socket file on which nobody listens belongs to a daemon that was killed, and is removed; so are stale sockets of
    foreground attaches in the same directory.

    Raises:
        HookdError: reason "already-running": a daemon answers there.
        PermissionDenied: the directory is not writable, or another user can write to it.
    """
    _own_directory(path.parent)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # The socket file inherits the descriptor's mode, so it is never open to others.
    os.fchmod(listener.fileno(), 0o600)
    try:
        _remove_stale(path)
        _remove_abandoned(path.parent)
        listener.bind(str(path))
        path.chmod(0o600)
    except OSError as exc:
        listener.close()
        raise PermissionDenied(
            f"cannot bind the control socket {path}: {exc.strerror or exc}",
            reason="control-socket",
            hint="Name another place with --control.",
        ) from exc
    except HookdError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def _own_directory(directory: Path) -> None:
    """Create the directory, and check that no other user can put a socket there."""
    try:
        make_private(directory)
        status = directory.stat()
    except OSError as exc:
        raise PermissionDenied(
            f"cannot make the directory {directory}: {exc.strerror}",
            reason="control-socket",
            hint="Name another place with --control, or set XDG_RUNTIME_DIR.",
        ) from exc
    if status.st_uid not in (0, os.geteuid()) or (
        stat.S_IMODE(status.st_mode) & 0o022 and not status.st_mode & stat.S_ISVTX
    ):
        raise PermissionDenied(
            f"others may write to the directory {directory}",
            reason="control-socket",
            hint="Name another with --control.",
        )


def _remove_stale(path: Path) -> None:
    if path.is_socket() and not _remove_if_refused(path):
        raise HookdError(
            f"another daemon answers on {path}",
            reason="already-running",
            hint="Use it (`hookd status`), or start this one with another --control and --listen.",
        )


def _remove_abandoned(directory: Path) -> None:
    """Remove the sockets of foreground attaches that were killed."""
    for path in directory.glob(EMBEDDED_SOCKET.format("*")):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > STARTING_S and path.is_socket():
                _remove_if_refused(path)


def _remove_if_refused(path: Path) -> bool:
    """Remove a socket file on which nobody listens; return False if somebody does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except FileNotFoundError:
            pass
        else:
            return False
    return True
