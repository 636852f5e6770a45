"""The read-only HTTP routes over TCP: metrics, health, pages and JSON."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import logging
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from aiohttp import web

from hookd.errors import UsageError
from hookd.tool.daemon.api import incident_filter
from hookd.tool.daemon.metrics.scrapes import BusyError, Form, Scrapes
from hookd.tool.daemon.web.negotiation import preferred, takes_gzip
from hookd.tool.daemon.web.pages import frame
from hookd.tool.daemon.web.pages.routes import Pages

if TYPE_CHECKING:
    from hookd.tool.daemon.api import Handler
    from hookd.tool.daemon.metrics.collector import FleetCollector
    from hookd.tool.daemon.service import Service

MAX_SENDING = 8
"""Maximum number of distinct bodies in transfer, each of some MB; beyond it the readers of the oldest are cut off."""
SENDING_S = 10.0
"""Timeout of a transfer; Prometheus gives up after its scrape_timeout, 10 s by default."""
FIRST_SCAN_S = 5.0
"""Time that a scrape waits for a starting daemon's first scan: half of Prometheus' default timeout."""
_PORTION = 1 << 18
_LARGE_BLOCK = 1 << 20
_M_MMAP_THRESHOLD = -3  # malloc.h
_HEADERS = {
    "Content-Security-Policy": frame.POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_log = logging.getLogger(__name__)


class Web:
    """The routes on TCP."""

    def __init__(self, service: Service, collector: FleetCollector) -> None:
        self._service = service
        self._collector = collector
        self._scrapes = Scrapes(collector)
        # A separate thread: many requests must not delay the scan for targets.
        self._reader = ThreadPoolExecutor(1, "incidents")
        self._sending: dict[asyncio.Transport, bytes] = {}  # in order of their start

    def app(self) -> web.Application:
        """Return the application with all routes."""
        _return_large_blocks()
        app = web.Application(middlewares=[_answer_errors], client_max_size=0)
        app.on_response_prepare.append(_add_headers)
        app.on_cleanup.append(self._close)
        Pages(self._service, self._collector).add_to(app)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/-/healthy", self._healthy)
        app.router.add_get("/-/ready", self._ready)
        app.router.add_get("/sd", self._sd)
        app.router.add_get("/api/v1/targets", self._targets)
        app.router.add_get("/api/v1/incidents", self._incidents)
        app.router.add_get("/api/v1/panels", self._panels)
        return app

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        is_gzip = takes_gzip(request.headers.get("Accept-Encoding", ""))
        names = frozenset(request.query.getall("name[]", []))
        form = Form(preferred(request.headers.get("Accept", "")), names, is_gzip)
        await self._service.wait_until_ready(FIRST_SCAN_S)
        try:
            body = await self._scrapes.text(form)
        except BusyError:
            return web.Response(status=503, text="too many scrapes at once\n")
        headers = {"Content-Type": form.content_type, "Vary": "Accept, Accept-Encoding"}
        return await self._send(request, body, {**headers, **({"Content-Encoding": "gzip"} if is_gzip else {})})

    async def _send(self, request: web.Request, body: bytes, headers: dict[str, str]) -> web.StreamResponse:
        """Send a body within SENDING_S, because aiohttp would keep it for as long as the reader does not read."""
        transport = request.transport
        if request.method == "HEAD" or transport is None:
            return web.Response(body=body, headers=headers)
        response = web.StreamResponse(headers=headers)
        response.content_length = len(body)
        await response.prepare(request)
        self._make_room(body)
        self._sending[transport] = body
        timer = asyncio.get_running_loop().call_later(SENDING_S, transport.abort)
        try:
            await _write(response, body)
        except ConnectionError as error:
            traceback.clear_frames(error.__traceback__)  # a frame refers to the error: a cycle that would keep the body
        finally:
            timer.cancel()
            self._sending.pop(transport, None)
        return response

    def _make_room(self, body: bytes) -> None:
        """Cut off all readers of the oldest body if there would be one too many; a body may have several readers."""
        while len({id(text) for text in (*self._sending.values(), body)}) > MAX_SENDING:
            oldest = next(iter(self._sending.values()))
            for transport in [reader for reader, text in self._sending.items() if text is oldest]:
                del self._sending[transport]
                transport.abort()

    async def _close(self, _: web.Application) -> None:
        self._scrapes.close()
        self._reader.shutdown(wait=False, cancel_futures=True)

    async def _healthy(self, _: web.Request) -> web.Response:
        return web.Response(text="hookd is healthy\n")

    async def _ready(self, _: web.Request) -> web.Response:
        if not self._service.is_ready:
            return web.Response(status=503, text="hookd is starting: the first scan for targets is not finished\n")
        return web.Response(text="hookd is ready\n")

    async def _sd(self, request: web.Request) -> web.Response:
        """Return this daemon as a target for Prometheus' http_sd_configs, under the address that the client used."""
        # Not `request.host`: without the header it would query the name service and block the event loop.
        host = request.headers.get("Host") or self._service.url.partition("://")[2]
        labels = {"__metrics_path__": "/metrics", **({"__scheme__": "https"} if request.secure else {})}
        return web.json_response([{"targets": [host], "labels": labels}])

    async def _targets(self, _: web.Request) -> web.Response:
        return web.json_response({"targets": self._service.rows()})

    async def _panels(self, _: web.Request) -> web.Response:
        return web.json_response({"panels": self._service.plugins.panels()})

    async def _incidents(self, request: web.Request) -> web.Response:
        wanted = incident_filter(request)
        ask = functools.partial(self._service.fleet.incidents, **wanted)
        return web.json_response({"incidents": await asyncio.get_running_loop().run_in_executor(self._reader, ask)})


async def _write(response: web.StreamResponse, body: bytes) -> None:
    """Write in chunks, because asyncio copies what is not sent at once (Python 3.11 and earlier)."""
    view = memoryview(body)
    for start in range(0, len(view), _PORTION):
        await response.write(view[start : start + _PORTION])


def _return_large_blocks() -> None:
    """Make malloc return large blocks when they are freed; by default glibc keeps blocks of up to 32 MiB.

    Source: glibc's mallopt(3), "dynamic mmap threshold". Other libraries have no `mallopt`, or one that does nothing.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK)


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except UsageError as exc:
        return web.json_response({"error": exc.message, "reason": exc.reason}, status=400)


async def _add_headers(_: web.Request, response: web.StreamResponse) -> None:
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)
