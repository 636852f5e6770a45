"""The text of scrapes: made one at a time, in a thread of its own, and shared by all who wait for the same."""

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
"""Unusual scrapes that wait; more are sent away. Those of a Prometheus are never: they are few kinds, and share a text."""
_USUAL = re.compile(r"version=(0\.0\.4|1\.0\.0)(;|\Z)")


class BusyError(Exception):
    """Too many unusual scrapes wait."""


@dataclass(frozen=True)
class Form:
    """What a scrape asks for.

    Attributes:
        accept: its header; OpenMetrics where that is asked for.
        names: of families or samples; empty for all.
        is_gzip: whether to compress, at the level that costs least.
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
        """Whether it is one of the few that a Prometheus sends: there are dozens of them, of others any number."""
        return not self.names and _USUAL.search(self.content_type) is not None

    @property
    def key(self) -> tuple[str, frozenset[str], bool]:
        """Equal for scrapes that have the same text."""
        return self.content_type, self.names, self.is_gzip


class Scrapes:
    """Makes the text of scrapes. For the event loop."""

    def __init__(self, collector: FleetCollector) -> None:
        self._collector = collector
        # One thread for all: malloc keeps the memory of a large page for each thread that has made one.
        self._thread = ThreadPoolExecutor(1, "render")
        self._turn, self._unusual = asyncio.Lock(), asyncio.Lock()
        self._waiting: dict[tuple[str, frozenset[str], bool], asyncio.Task[bytes]] = {}
        self._count = 0

    async def text(self, form: Form) -> bytes:
        """Make a text, or share one that is not begun yet: 1,000 series take some 5 ms.

        Raises:
            BusyError: too many are waiting.
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
                await stack.enter_async_context(self._unusual)  # of these, one at a time waits among the others
            await stack.enter_async_context(self._turn)
            del self._waiting[form.key]  # who asks from now on is told of a later moment
            work = functools.partial(render, self._collector, form.accept, form.names, is_gzip=form.is_gzip)
            return (await asyncio.get_running_loop().run_in_executor(self._thread, work))[0]

    def _uncount(self) -> None:
        self._count -= 1

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def render(collector: FleetCollector, accept: str, names: frozenset[str], *, is_gzip: bool) -> tuple[bytes, str]:
    """Make the text of one scrape; see `Form`.

    Returns:
        The body and its content type.
    """
    encoder, content_type = exposition.choose_encoder(accept)
    body = encoder(_Restricted(collector, names)) if names else encode(collector.families(), encoder)
    return (gzip.compress(body, 1) if is_gzip else body), content_type


class _Restricted:
    """The families and samples that `name[]` asks for, as prometheus_client's own restricted registry gives them."""

    def __init__(self, collector: FleetCollector, names: frozenset[str]) -> None:
        self._collector = collector
        self._names = names

    def collect(self) -> Iterator[Metric]:
        for family in self._collector.families():
            if isinstance(family, PageFamily) and self._names.isdisjoint(family.sample_names()):
                continue  # whose samples are many: they are not made to be left out
            metric = family.metric() if isinstance(family, PageFamily) else family
            samples = metric.samples
            if metric.name not in self._names:
                samples = [sample for sample in samples if sample.name in self._names]
            if samples:
                kept = Metric(metric.name, metric.documentation, metric.type)
                kept.samples = samples
                yield kept
