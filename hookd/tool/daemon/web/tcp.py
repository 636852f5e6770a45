"""The TCP port: connections are counted and timed before aiohttp sees them, and each gets the certificate of its moment.

aiohttp has no limit on connections, none on the time that headers take, and none on a reader that takes nothing. It
sees a connection only after the TLS handshake, so we accept them ourselves.
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
from hookd.tool.daemon.web.host_names import Names

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Iterable
    from pathlib import Path

    from aiohttp.typedefs import Middleware

    from hookd.tool.config.values import Address
    from hookd.tool.daemon.api import Handler

MAX_LINE, MAX_FIELD = 4096, 8190
"""Bytes of a request's first line and of a header; of headers aiohttp takes 128."""
GRACE_S = 0.2
"""How long each connection may shake hands, wait or not read, however many want its place."""
_BACKLOG = 512
_PAUSE_S = 0.2
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 21\r\nConnection: close\r\n\r\ntoo many connections\n"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """What one peer, and all of them, may take.

    Attributes:
        connections: open at a time; fewer than the descriptors that `room.RESERVE` keeps from the targets.
        handshake_s: for TLS.
        header_s: from a request's first byte, or the connection's beginning, to the end of its headers.
        idle_s: between two requests; longer than the usual scrape intervals.
        sending_s: how long a reader may take nothing.
    """

    connections: int = 96
    handshake_s: float = 5.0
    header_s: float = 10.0
    idle_s: float = 90.0
    sending_s: float = 10.0


@dataclass(frozen=True)
class Waiting:
    """A connection that may have to go: since when it waits, and how it is ended."""

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
    """Serve an application behind a guard for the duration of a block, and give its URL.

    Args:
        app: it is changed.
        listen: where; port 0 for any.
        web_config: TLS and passwords.
        limits: what peers may take.
        allow_hosts: names to answer to beside the machine's own; see `names`.

    Raises:
        ConfigError: the web configuration is wrong.
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
        Guard(app, access, Names(allow_hosts, is_local=reachable_at is None))
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
    """Have a server refuse whoever expects something other than aiohttp knows, before aiohttp does.

    Its own refusal quotes the words, and fails where they are no UTF-8 (web_urldispatcher.py, 3.14).
    """
    server = runner.server
    assert server is not None
    handle = server.request_handler

    async def check(request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get("Expect", "100-continue").lower() != "100-continue":
            return web.Response(status=417, text="nothing is known of that\n")
        return await handle(request)

    server.request_handler = check
    return server


class Port:
    """Accepts connections and hands them to a server, within limits.

    Args:
        access: has the TLS context for each.
        limits: what they may take.
    """

    def __init__(self, access: Access, limits: Limits) -> None:
        self._access, self.limits = access, limits
        # In the order of their waits: those without a request, those that do not take their answer.
        self._idle: dict[asyncio.BaseTransport, Waiting] = {}
        self._stalled: dict[asyncio.BaseTransport, Waiting] = {}
        self._open: dict[asyncio.BaseTransport, Connection] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._hands: dict[asyncio.Task[None], Waiting] = {}  # handshakes, in the order of their beginnings

    def open(self, make: Callable[[], asyncio.Protocol], listeners: Iterable[socket.socket]) -> None:
        """Begin to accept."""
        for listener in listeners:
            task = asyncio.create_task(self._accept(make, listener))
            self._tasks.add(task)

    async def close(self) -> None:
        """Accept no more; who is connected is the server's."""
        tasks = [*self._tasks, *self._hands]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def middleware(self) -> Middleware:
        """Tell when a request's headers are complete, and when it is answered."""

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
            except OSError as exc:  # no descriptor is free, or the peer has gone
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
            await asyncio.sleep(0)  # the others' turn: an accept that succeeds at once gives them none

    async def _make_room(self) -> bool:
        """Make room where there is none: one without a request, in a handshake, or that does not read has to go, oldest first.

        Each has GRACE_S. Until then those who come wait in the kernel's queue: a crowd that comes and goes quickly would
        else push out a scraper in the midst of its handshake.

        Returns:
            False: all are busy.
        """
        loop = asyncio.get_running_loop()
        while len(self._open) + len(self._hands) >= self.limits.connections:
            oldest = [next(iter(some.values())) for some in (self._idle, self._hands, self._stalled) if some]
            if not oldest:
                return False
            ripe = next((one for one in oldest if loop.time() >= one.since + GRACE_S), None)
            if ripe is None:
                await asyncio.sleep(min(one.since for one in oldest) + GRACE_S - loop.time())
            else:
                ripe.end()
        return True

    def _let_go(self, hand: asyncio.Task[None]) -> None:
        hand.cancel()
        self._hands.pop(hand)

    def _refuse(self, accepted: socket.socket) -> None:
        with contextlib.suppress(OSError), accepted:
            if self._access.context is None:
                accepted.send(_FULL)

    async def _connect(self, make: Callable[[], asyncio.Protocol], accepted: socket.socket) -> None:
        """Shake hands; whatever comes of it, asyncio closes the socket in the end."""
        accepted.setblocking(False)
        self._access.refresh()
        context = self._access.context
        handshake_s = None if context is None else self.limits.handshake_s
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                lambda: Connection(make(), self), accepted, ssl=context, ssl_handshake_timeout=handshake_s
            )
        except (OSError, asyncio.TimeoutError) as exc:  # it is no TLS, has no certificate, or takes too long
            _log.debug("no connection: %s", exc)

    def take(self, transport: asyncio.BaseTransport, connection: Connection) -> bool:
        """Count a connection; False for one whose certificate holds none of the names that may ask."""
        self._open[transport] = connection
        return not self._access.sans or not self._access.sans.isdisjoint(_names(transport))

    def note(self, transport: asyncio.BaseTransport, connection: Connection | None) -> None:
        """Note since when a connection has no request; None: it has one."""
        self._idle.pop(transport, None)
        if connection is not None:
            self._idle[transport] = Waiting(asyncio.get_running_loop().time(), connection.abort)

    def stall(self, transport: asyncio.BaseTransport, connection: Connection | None) -> None:
        """Note since when a connection does not take its answer; None: it does."""
        self._stalled.pop(transport, None)
        if connection is not None:
            self._stalled[transport] = Waiting(asyncio.get_running_loop().time(), connection.abort)

    def drop(self, transport: asyncio.BaseTransport) -> None:
        """Forget a connection."""
        for connections in (self._open, self._idle, self._stalled):
            connections.pop(transport, None)


class Connection(asyncio.Protocol):
    """Stands between a transport and aiohttp's own protocol, and cuts off who takes too long."""

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
        """Its request is complete: from now on the daemon takes the time."""
        self._requests += 1
        self._is_reading = False
        if self._timer is not None:
            self._timer.cancel()
        self._port.note(self._transport, None)

    def ended(self) -> None:
        """Its request is answered, as far as it is ours."""
        self._requests -= 1
        if not self._transport.is_closing():
            self._wait(self._port.limits.idle_s)

    def abort(self) -> None:
        """Cut it off; its place is free at once."""
        self._port.drop(self._transport)
        self._transport.abort()

    def _wait(self, limit_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(limit_s, self.abort)
        self._port.note(self._transport, self)


def _names(transport: asyncio.BaseTransport) -> set[str]:
    """Give the names in the certificate of a client: of hosts, addresses, mailboxes, URIs."""
    certificate = transport.get_extra_info("peercert") or {}
    return {str(value) for _, value in certificate.get("subjectAltName", ())}


class _Quiet(logging.Filter):
    """Keeps from the log that a request was no HTTP: who asks could fill it, with a traceback each time."""

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
    "lingering_time": 1.0,  # for a body that nobody reads
    "max_field_size": MAX_FIELD,
    "auto_decompress": False,  # no body is read here, so none is unpacked
}
"""How aiohttp is told to serve, on TCP and on the control socket."""


async def _bound(listen: Address) -> list[socket.socket]:
    """Bind every address that a name has.

    Raises:
        OSError: of the first that cannot be bound, unless it is one of a family that this machine has not.
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
    """Where the kernel chooses the port, it is one for all addresses."""
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
    """Return an address where other machines can connect; None: there is none."""
    hosts = [str(one.getsockname()[0]) for one in listeners]
    return next((host for host in hosts if not ipaddress.ip_address(host.partition("%")[0]).is_loopback), None)


def _warn(where: str, access: Access) -> None:
    """Say what others may read, where others can connect."""
    if access.config is None:
        _log.warning(
            "everybody who reaches %s may read names, command lines and incidents of all trainings, and nothing is "
            "encrypted: give a --web-config (docs/security.md), or listen on 127.0.0.1", where,
        )  # fmt: skip
    elif access.context is None and access.users:
        _log.warning("passwords come to %s without encryption: give the web configuration a tls_server_config", where)
