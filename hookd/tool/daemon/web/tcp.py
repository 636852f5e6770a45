"""The TCP port: counts and times connections before aiohttp sees them, each with the current certificate.

aiohttp limits neither the number of connections, nor the time for headers, nor readers that do not read. It sees a
connection only after the TLS handshake, so connections are accepted here.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import ipaddress
import logging
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp import http_exceptions, web

from hookd.tool.daemon.web.access import Access
from hookd.tool.daemon.web.guard import Guard
from hookd.tool.daemon.web.host_names import HostNames

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Iterable
    from pathlib import Path

    from aiohttp.typedefs import Middleware

    from hookd.tool.config.values import Address
    from hookd.tool.daemon.api import Handler

MAX_LINE, MAX_FIELD = 4096, 8190
"""Maximum bytes of the request line and of a header; aiohttp accepts up to 128 headers."""
GRACE_S = 0.2
"""Minimum time for a connection to shake hands, be idle or not read, before it is closed to make room."""
_BACKLOG = 512
_PAUSE_S = 0.2
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 21\r\nConnection: close\r\n\r\ntoo many connections\n"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """Limits for connections; times in seconds.

    Attributes:
        connections: maximum open at a time; fewer than the descriptors that `fd_budget.RESERVE` keeps from the targets.
        handshake_s: timeout of the TLS handshake.
        header_s: from a request's first byte, or the start of the connection, to the end of its headers.
        idle_s: between two requests; longer than the usual scrape intervals.
        sending_s: how long a client may read nothing.
    """

    connections: int = 96
    handshake_s: float = 5.0
    header_s: float = 10.0
    idle_s: float = 90.0
    sending_s: float = 10.0


@dataclass(frozen=True)
class Waiting:
    """A connection that may be closed to make room: its waiting start (loop time), and the function that ends it."""

    since: float
    end: Callable[[], object]


@contextlib.asynccontextmanager
async def serving(
    app: web.Application,
    listen: Address,
    web_config: Path | None,
    limits: Limits | None = None,
    *,
    allow_hosts: Collection[str] = (),
) -> AsyncIterator[str]:
    """Serve an application behind a guard for the duration of a block, and yield its URL.

    Args:
        app: the application; its middlewares are changed.
        listen: the address; port 0 for any.
        web_config: the file with TLS and passwords.
        limits: limits for connections.
        allow_hosts: host names in addition to the machine's own; see `host_names`.

    Raises:
        ConfigError: the web configuration is invalid.
        OSError: the address cannot be bound.
    """
    limits = limits or Limits()
    access = Access(web_config)
    port = Port(access, limits)
    runner = web.AppRunner(
        app, handle_signals=False, shutdown_timeout=2, keepalive_timeout=limits.idle_s, **HTTP, max_line_size=MAX_LINE
    )
    async with contextlib.AsyncExitStack() as stack:
        listeners = await _bound(listen)
        for listener in listeners:
            stack.callback(listener.close)
        reachable_at = _reachable_at(listeners)
        Guard(app, access, HostNames(allow_hosts, is_local=reachable_at is None))
        app.middlewares.insert(0, port.middleware())
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        stack.push_async_callback(port.close)
        port.open(refusing(runner), listeners)
        if reachable_at is not None:
            _warn(reachable_at, access)
        host, number = listeners[0].getsockname()[:2]
        scheme = "http" if access.context is None else "https"
        yield f"{scheme}://[{host}]:{number}" if ":" in host else f"{scheme}://{host}:{number}"


def refusing(runner: web.AppRunner) -> web.Server:
    """Make a server refuse unknown `Expect` headers before aiohttp does.

    aiohttp's own refusal quotes the header, and fails if it is not UTF-8 (web_urldispatcher.py, 3.14).
    """
    server = runner.server
    assert server is not None
    handle = server.request_handler

    async def check(request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get("Expect", "100-continue").lower() != "100-continue":
            return web.Response(status=417, text="this expectation is not supported\n")
        return await handle(request)

    server.request_handler = check
    return server


class Port:
    """Accepts connections and hands them to a server, within limits."""

    def __init__(self, access: Access, limits: Limits) -> None:
        self._access, self.limits = access, limits
        # Both in order of waiting time: connections without a request, and those that do not read their response.
        self._idle: dict[asyncio.BaseTransport, Waiting] = {}
        self._stalled: dict[asyncio.BaseTransport, Waiting] = {}
        self._open: dict[asyncio.BaseTransport, Connection] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._hands: dict[asyncio.Task[None], Waiting] = {}  # handshakes, in order of their start

    def open(self, make: Callable[[], asyncio.Protocol], listeners: Iterable[socket.socket]) -> None:
        """Start accepting connections."""
        for listener in listeners:
            task = asyncio.create_task(self._accept(make, listener))
            self._tasks.add(task)

    async def close(self) -> None:
        """Stop accepting; open connections belong to the server."""
        tasks = [*self._tasks, *self._hands]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def middleware(self) -> Middleware:
        """Return a middleware that notifies connections of the start and end of each request."""

        @web.middleware
        async def timed(request: web.Request, handler: Handler) -> web.StreamResponse:
            connection = self._open.get(request.transport) if request.transport is not None else None
            if connection is None:
                return await handler(request)
            connection.began()
            try:
                return await handler(request)
            finally:
                connection.ended()

        return timed

    async def _accept(self, make: Callable[[], asyncio.Protocol], listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listener)
            except OSError as exc:  # no free descriptor, or the peer has disconnected
                _log.log(logging.DEBUG if exc.errno == errno.ECONNABORTED else logging.WARNING, "accept: %s", exc)
                await asyncio.sleep(_PAUSE_S)
                continue
            try:
                has_room = await self._make_room()
            except BaseException:
                accepted.close()
                raise
            if not has_room:
                self._refuse(accepted)
            else:
                task = asyncio.create_task(self._connect(make, accepted))
                self._hands[task] = Waiting(loop.time(), functools.partial(self._let_go, task))
                task.add_done_callback(lambda done: self._hands.pop(done, None))
            await asyncio.sleep(0)  # let other tasks run: an accept that succeeds at once does not yield

    async def _make_room(self) -> bool:
        """Close a connection if the limit is reached: one that is idle, in a handshake or does not read, oldest first.

        Each gets GRACE_S; until then new connections wait in the kernel's queue. Otherwise many short connections would
        push out a scraper in the middle of its handshake.

        Returns:
            False if all connections are busy.
        """
        loop = asyncio.get_running_loop()
        while len(self._open) + len(self._hands) >= self.limits.connections:
            oldest = [next(iter(group.values())) for group in (self._idle, self._hands, self._stalled) if group]
            if not oldest:
                return False
            expired = next((waiting for waiting in oldest if loop.time() >= waiting.since + GRACE_S), None)
            if expired is None:
                await asyncio.sleep(min(waiting.since for waiting in oldest) + GRACE_S - loop.time())
            else:
                expired.end()
        return True

    def _let_go(self, hand: asyncio.Task[None]) -> None:
        hand.cancel()
        self._hands.pop(hand)

    def _refuse(self, accepted: socket.socket) -> None:
        with contextlib.suppress(OSError), accepted:
            if self._access.context is None:
                accepted.send(_FULL)

    async def _connect(self, make: Callable[[], asyncio.Protocol], accepted: socket.socket) -> None:
        """Perform the handshake; asyncio closes the socket in any case."""
        accepted.setblocking(False)
        self._access.refresh()
        context = self._access.context
        handshake_s = None if context is None else self.limits.handshake_s
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                lambda: Connection(make(), self), accepted, ssl=context, ssl_handshake_timeout=handshake_s
            )
        except (OSError, asyncio.TimeoutError) as exc:  # not TLS, no client certificate, or too slow
            _log.debug("no connection: %s", exc)

    def take(self, transport: asyncio.BaseTransport, connection: Connection) -> bool:
        """Register a connection; return False if its certificate has none of the allowed names."""
        self._open[transport] = connection
        return not self._access.sans or not self._access.sans.isdisjoint(_names(transport))

    def note(self, transport: asyncio.BaseTransport, connection: Connection | None) -> None:
        """Record that a connection has no request as of now; None if it has one."""
        self._idle.pop(transport, None)
        if connection is not None:
            self._idle[transport] = Waiting(asyncio.get_running_loop().time(), connection.abort)

    def stall(self, transport: asyncio.BaseTransport, connection: Connection | None) -> None:
        """Record that a connection does not read its response as of now; None if it does."""
        self._stalled.pop(transport, None)
        if connection is not None:
            self._stalled[transport] = Waiting(asyncio.get_running_loop().time(), connection.abort)

    def drop(self, transport: asyncio.BaseTransport) -> None:
        """Forget a connection."""
        for connections in (self._open, self._idle, self._stalled):
            connections.pop(transport, None)


class Connection(asyncio.Protocol):
    """Protocol between a transport and aiohttp's own protocol; aborts connections that exceed a limit."""

    def __init__(self, inner: asyncio.Protocol, port: Port) -> None:
        self._inner, self._port = inner, port
        self._transport: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None
        self._requests = 0
        self._is_reading = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = transport
        is_welcome = self._port.take(transport, self)
        self._inner.connection_made(transport)
        self._wait(self._port.limits.header_s)
        if not is_welcome:
            self.abort()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if not self._requests and not self._is_reading:
            self._wait(self._port.limits.header_s)
            self._is_reading = True
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        """See asyncio.Protocol."""
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        loop = asyncio.get_running_loop()
        self._sending = loop.call_later(self._port.limits.sending_s, self.abort)
        self._port.note(self._transport, None)
        self._port.stall(self._transport, self)
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        if self._sending is not None:
            self._sending.cancel()
        self._port.stall(self._transport, None)
        if not self._requests:
            self._port.note(self._transport, self)
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._port.drop(self._transport)
        for timer in (self._timer, self._sending):
            if timer is not None:
                timer.cancel()
        self._inner.connection_lost(exc)

    def began(self) -> None:
        """Stop the header timer: the request is complete, and the time is the daemon's."""
        self._requests += 1
        self._is_reading = False
        if self._timer is not None:
            self._timer.cancel()
        self._port.note(self._transport, None)

    def ended(self) -> None:
        """Start the idle timer: the handler of the request has finished."""
        self._requests -= 1
        if not self._transport.is_closing():
            self._wait(self._port.limits.idle_s)

    def abort(self) -> None:
        """Abort the connection; its place is free at once."""
        self._port.drop(self._transport)
        self._transport.abort()

    def _wait(self, limit_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(limit_s, self.abort)
        self._port.note(self._transport, self)


def _names(transport: asyncio.BaseTransport) -> set[str]:
    """Return the subject alternative names of a client certificate: hosts, addresses, mailboxes, URIs."""
    certificate = transport.get_extra_info("peercert") or {}
    return {str(value) for _, value in certificate.get("subjectAltName", ())}


class _Quiet(logging.Filter):
    """Drops log records of invalid HTTP: clients could fill the log, with a traceback each time."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, (http_exceptions.HttpProcessingError, ConnectionError, asyncio.TimeoutError))


def _logger() -> logging.Logger:
    logger = logging.getLogger("hookd.tool.daemon.http")
    logger.addFilter(_QUIET)
    return logger


_QUIET = _Quiet()
HTTP: dict[str, Any] = {
    "access_log": None,
    "logger": _logger(),
    "lingering_time": 1.0,  # for request bodies, which nobody reads
    "max_field_size": MAX_FIELD,
    "auto_decompress": False,  # request bodies are not read
}
"""Arguments of aiohttp's runners, on TCP and on the control socket."""


async def _bound(listen: Address) -> list[socket.socket]:
    """Bind every address of a name, except those of address families that this machine lacks.

    Raises:
        OSError: an address could not be bound, or there was none to bind.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(listen.host, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners: list[socket.socket] = []
    absent: list[OSError] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            try:
                listeners.append(_listening(family, kind, protocol, _with_port(address, listeners)))
            except OSError as exc:
                if exc.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                absent.append(exc)
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    if not listeners:
        raise absent[0]
    return listeners


def _with_port(address: Any, before: list[socket.socket]) -> Any:
    """Return an address with the port of the first listener, if the kernel chooses the port."""
    return (address[0], before[0].getsockname()[1], *address[2:]) if before and not address[1] else address


def _listening(family: int, kind: int, protocol: int, address: Any) -> socket.socket:
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _reachable_at(listeners: Iterable[socket.socket]) -> str | None:
    """Return an address that other machines can connect to; None if there is none."""
    hosts = [str(listener.getsockname()[0]) for listener in listeners]
    return next((host for host in hosts if not ipaddress.ip_address(host.partition("%")[0]).is_loopback), None)


def _warn(where: str, access: Access) -> None:
    """Log a warning about what others can read on a reachable address."""
    if access.config is None:
        _log.warning(
            "everybody who reaches %s may read names, command lines and incidents of all trainings, and nothing is "
            "encrypted: give a --web-config (docs/security.md), or listen on 127.0.0.1", where,
        )  # fmt: skip
    elif access.context is None and access.users:
        _log.warning("passwords come to %s without encryption: give the web configuration a tls_server_config", where)
