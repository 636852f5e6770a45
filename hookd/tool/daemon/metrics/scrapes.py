"""Render scrapes: one at a time, in a separate thread; waiting requests of the same form share one text."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gzip
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import exposition
from prometheus_client.core import Metric

from hookd.tool.daemon.metrics.families import PageFamily, encode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookd.tool.daemon.metrics.collector import FleetCollector

MAX_WAITING = 20
"""Maximum number of unusual scrapes that wait; more are rejected.

Scrapes of a Prometheus are never rejected: they have few forms, and share a text.
"""
_USUAL = re.compile(r"version=(0\.0\.4|1\.0\.0)(;|\Z)")


class BusyError(Exception):
    """Too many unusual scrapes are waiting."""


@dataclass(frozen=True)
class Form:
    """The form in which a scrape requests its text.

    Attributes:
        accept: the Accept header, which may request OpenMetrics.
        names: of families or samples; empty for all.
        is_gzip: whether to compress, at the fastest level.
    """

    accept: str
    names: frozenset[str] = frozenset()
    is_gzip: bool = False

    @functools.cached_property
    def content_type(self) -> str:
        """The content type of the answer."""
        return exposition.choose_encoder(self.accept)[1]

    @property
    def is_usual(self) -> bool:
        """Whether a Prometheus sends this form; there are only dozens of such forms, but any number of others."""
        return not self.names and _USUAL.search(self.content_type) is not None

    @property
    def key(self) -> tuple[str, frozenset[str], bool]:
        """Equal for scrapes that have the same text."""
        return self.content_type, self.names, self.is_gzip


class Scrapes:
    """Renders scrapes for the event loop."""

    def __init__(self, collector: FleetCollector) -> None:
        self._collector = collector
        # One thread for all: malloc retains the memory of a large text in each thread that has rendered one.
        self._thread = ThreadPoolExecutor(1, "render")
        self._rendering, self._unusual = asyncio.Lock(), asyncio.Lock()
        self._waiting: dict[tuple[str, frozenset[str], bool], asyncio.Task[bytes]] = {}
        self._count = 0

    async def text(self, form: Form) -> bytes:
        """Render a text, or share one that waits to be rendered.

        Rendering 1,000 series takes some 5 ms.

        Raises:
            BusyError: too many unusual scrapes are waiting.
        """
        task = self._waiting.get(form.key)
        if task is None:
            if not form.is_usual and self._count >= MAX_WAITING:
                raise BusyError
            task = self._waiting[form.key] = asyncio.create_task(self._make(form))
        return await asyncio.shield(task)

    async def _make(self, form: Form) -> bytes:
        async with contextlib.AsyncExitStack() as stack:
            if not form.is_usual:
                self._count += 1
                stack.callback(self._uncount)
                await stack.enter_async_context(self._unusual)  # at most one unusual scrape competes for the lock
            await stack.enter_async_context(self._rendering)
            del self._waiting[form.key]  # a later request needs newer values
            work = functools.partial(render, self._collector, form.accept, form.names, is_gzip=form.is_gzip)
            return (await asyncio.get_running_loop().run_in_executor(self._thread, work))[0]

    def _uncount(self) -> None:
        self._count -= 1

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def render(collector: FleetCollector, accept: str, names: frozenset[str], *, is_gzip: bool) -> tuple[bytes, str]:
    """Render the text of one scrape; see `Form`.

    Returns:
        The body and its content type.
    """
    encoder, content_type = exposition.choose_encoder(accept)
    body = encoder(_Restricted(collector, names)) if names else encode(collector.families(), encoder)
    return (gzip.compress(body, 1) if is_gzip else body), content_type


class _Restricted:
    """The families and samples selected by `name[]`, as in prometheus_client's own restricted registry."""

    def __init__(self, collector: FleetCollector, names: frozenset[str]) -> None:
        self._collector = collector
        self._names = names

    def collect(self) -> Iterator[Metric]:
        for family in self._collector.families():
            if isinstance(family, PageFamily) and self._names.isdisjoint(family.sample_names()):
                continue  # skip it before its many samples are made
            metric = family.metric() if isinstance(family, PageFamily) else family
            samples = metric.samples
            if metric.name not in self._names:
                samples = [sample for sample in samples if sample.name in self._names]
            if samples:
                selected = Metric(metric.name, metric.documentation, metric.type, metric.unit)
                selected.samples = samples
                yield selected
