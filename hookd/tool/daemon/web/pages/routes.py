"""Routes of the pages, which are rendered in a separate thread, one at a time."""

from __future__ import annotations

import asyncio
import functools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import psutil
from aiohttp import web

from hookd.tool.daemon.web.pages import assets, frame, home, incident, run
from hookd.wire import labels

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hookd.tool.daemon.metrics.collector import FleetCollector
    from hookd.tool.daemon.service import Service
    from hookd.tool.daemon.web.pages.html import Markup

MAX_WAITING = 20
"""Maximum concurrent page requests; further ones are refused with 503."""
INCIDENTS = 50
"""Maximum incidents shown of a run, the newest ones."""
FOREVER = "public, max-age=31536000, immutable"


class Pages:
    """Serves the pages, the stylesheet and the script."""

    def __init__(self, service: Service, collector: FleetCollector) -> None:
        self._service, self._collector = service, collector
        self._maker = ThreadPoolExecutor(1, "page")
        self._waiting = 0

    def add_to(self, app: web.Application) -> None:
        """Add the routes, for GET (and HEAD) only."""
        app.router.add_get("/", self._home)
        app.router.add_get("/run/{name:.+}", self._run)
        app.router.add_get(r"/incident/{number:\d{1,18}}", self._incident)
        for name in assets.KINDS:
            app.router.add_get(assets.path(name), functools.partial(_file, name))
        app.on_cleanup.append(self._close)

    async def _close(self, _: web.Application) -> None:
        self._maker.shutdown(wait=False, cancel_futures=True)

    async def _home(self, request: web.Request) -> web.Response:
        return await self._answer(request, self._make_home)

    async def _run(self, request: web.Request) -> web.Response:
        choice = run.Choice.of(request.query)
        return await self._answer(request, functools.partial(self._make_run, request.match_info["name"], choice))

    async def _incident(self, request: web.Request) -> web.Response:
        return await self._answer(request, functools.partial(self._make_incident, int(request.match_info["number"])))

    async def _answer(self, request: web.Request, make: Callable[[], PageContent]) -> web.Response:
        """Return a page, or with `fragment` in the query only its parts, for the script to refresh."""
        if self._waiting >= MAX_WAITING:
            return web.Response(status=503, text="too many readers at once\n")
        whole = "fragment" not in request.query
        self._waiting += 1
        try:
            work = functools.partial(_written, make, is_whole=whole)
            text, status = await asyncio.get_running_loop().run_in_executor(self._maker, work)
        finally:
            self._waiting -= 1
        response = web.Response(text=text, content_type="text/html", status=status)
        response.enable_compression()
        return response

    def _make_home(self) -> PageContent:
        service = self._service
        incidents = service.fleet.incidents(limit=home.INCIDENTS)
        health = home.health_facts(service.status(), {**_own(), **self._collector.facts()})
        panels = service.plugins.panels()
        return PageContent("Targets", home.parts(service.fleet.targets(), service.history, incidents, health, panels))

    def _make_run(self, name: str, choice: run.Choice) -> PageContent:
        every = self._service.fleet.targets()
        if len(runs := labels.called([target.claim.run for target in every], name)) > 1:
            return self._missing(f"{name} is the name of several runs.", runs)
        name = next(iter(runs), name)
        targets = [target for target in every if target.claim.run == name]
        # A daemon serves a name to one user at a time; others may have had it before.
        user = targets[0].claim.uid if targets else None
        incidents = self._service.fleet.incidents(run=name, user=user, limit=INCIDENTS)
        if not targets and not incidents:
            return self._missing(
                f"There is no run {name!r} among the targets, and there are no stored incidents of one."
            )
        if targets and choice.pid is not None and all(target.pid != choice.pid for target in targets):
            return self._missing(f"Process {choice.pid} is not in run {name!r} any more.")
        parts = run.parts(
            name, targets, self._service.history, incidents, choice, fingerprints=self._service.fingerprints
        )
        return PageContent(run.title(name, targets), parts)

    def _make_incident(self, number: int) -> PageContent:
        rows = self._service.fleet.incidents(id=number)
        if not rows:
            return self._missing(f"There is no incident #{number}; the oldest incidents are deleted after a while.")
        row = rows[0]
        is_watched = any(
            (target.pid, target.start_ticks) == (row["pid"], row["start"]) for target in self._service.fleet.targets()
        )
        return PageContent(
            f"incident #{number}", incident.parts(row, is_watched=is_watched, now=time.time()), is_live=False
        )

    def _missing(self, what: str, runs: Sequence[str] | None = None) -> PageContent:
        if runs is None:
            runs = list(dict.fromkeys(target.claim.run for target in self._service.fleet.targets()))
        return PageContent("Not found", incident.missing(what, runs), is_live=False, status=404)


class PageContent:
    """The content of a page, with its title and status."""

    def __init__(self, title: str, parts: Sequence[Markup], *, is_live: bool = True, status: int = 200) -> None:
        self.title, self.parts, self.is_live, self.status = title, parts, is_live, status


def _written(make: Callable[[], PageContent], *, is_whole: bool) -> tuple[str, int]:
    made = make()
    text = frame.page(made.title, made.parts, is_live=made.is_live) if is_whole else "".join(made.parts)
    return text, made.status


async def _file(name: str, _: web.Request) -> web.Response:
    response = web.Response(
        text=assets.content(name), content_type=assets.KINDS[name], charset="utf-8", headers={"Cache-Control": FOREVER}
    )
    response.enable_compression()
    return response


def _own() -> dict[str, float | None]:
    """Return memory and CPU time of this process, as counted by the operating system."""
    process = psutil.Process()
    times = process.cpu_times()
    return {"resident_bytes": float(process.memory_info().rss), "cpu_s": float(times.user + times.system)}
