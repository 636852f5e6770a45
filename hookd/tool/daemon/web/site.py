"""What everybody who can connect may read over TCP: metrics, health, the pages. Nothing here changes anything."""

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
"""Texts on their way to readers that are slow, each some MB: with one more, the readers of the oldest are cut off."""
SENDING_S = 10.0
"""How long a reader may take; Prometheus itself gives up after its scrape_timeout, 10 s by default."""
FIRST_LOOK_S = 5.0
"""A scrape that comes while a daemon starts waits so long for its first look: half of what Prometheus waits for it."""
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
        # A thread of its own: a crowd that asks must not hold up the search for targets.
        self._reader = ThreadPoolExecutor(1, "incidents")
        self._sending: dict[asyncio.Transport, bytes] = {}  # in the order of their beginnings

    def app(self) -> web.Application:
        """Make the application."""
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
        await self._service.looked(FIRST_LOOK_S)
        try:
            body = await self._scrapes.text(form)
        except BusyError:
            return web.Response(status=503, text="too many scrapes at once\n")
        headers = {"Content-Type": form.content_type, "Vary": "Accept, Accept-Encoding"}
        return await self._send(request, body, {**headers, **({"Content-Encoding": "gzip"} if is_gzip else {})})

    async def _send(self, request: web.Request, body: bytes, headers: dict[str, str]) -> web.StreamResponse:
        """Send a body within a time, because aiohttp would keep it for as long as the reader leaves it lying."""
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
            traceback.clear_frames(error.__traceback__)  # one of them holds the error: a circle, and the body in it
        finally:
            timer.cancel()
            self._sending.pop(transport, None)
        return response

    def _make_room(self, body: bytes) -> None:
        """Cut off who still reads the oldest text, where there would be one too many; one text may have many readers."""
        while len({id(one) for one in (*self._sending.values(), body)}) > MAX_SENDING:
            oldest = next(iter(self._sending.values()))
            for transport in [one for one, text in self._sending.items() if text is oldest]:
                del self._sending[transport]
                transport.abort()

    async def _close(self, _: web.Application) -> None:
        self._scrapes.close()
        self._reader.shutdown(wait=False, cancel_futures=True)

    async def _healthy(self, _: web.Request) -> web.Response:
        return web.Response(text="hookd is healthy\n")

    async def _ready(self, _: web.Request) -> web.Response:
        if not self._service.is_ready:
            return web.Response(status=503, text="hookd looks for its targets for the first time\n")
        return web.Response(text="hookd is ready\n")

    async def _sd(self, request: web.Request) -> web.Response:
        """Give this daemon for Prometheus' http_sd_configs, under the address that the asker used."""
        # Not `request.host`: without the header it asks the name service who we are, and everything else waits.
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
    """Write in portions: of one that is not taken at once asyncio makes a copy, in Python 3.11 and before."""
    view = memoryview(body)
    for start in range(0, len(view), _PORTION):
        await response.write(view[start : start + _PORTION])


def _return_large_blocks() -> None:
    """Have malloc return what a page took as soon as it is freed; else glibc keeps blocks of up to 32 MiB for later.

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
