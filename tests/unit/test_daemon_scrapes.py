"""Scrapes that wait: equal requests share a text, and unusual ones do not cause a Prometheus to be refused."""

from __future__ import annotations

import asyncio
import gzip
import threading

import pytest

from hookd.tool.daemon.fleet.fleet import Fleet
from hookd.tool.daemon.incidents.store import IncidentStore
from hookd.tool.daemon.metrics import scrapes
from hookd.tool.daemon.metrics.collector import AttachCounter, FleetCollector
from hookd.tool.daemon.metrics.scrapes import BusyError, Form, Scrapes
from hookd.tool.daemon.metrics.selection import Limits
from tests.support.processes import PATIENCE_S

PROMETHEUS = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.5"


class Gated(FleetCollector):
    """Makes nothing until its gate is open, and counts its requests."""

    begun: threading.Event
    gate: threading.Event
    made: int

    def families(self):
        self.made += 1
        self.begun.set()
        assert self.gate.wait(PATIENCE_S)
        return super().families()

    def collect(self):
        self.made += 1
        return super().collect()


@pytest.fixture
def collector(stack, tmp_path):
    store = IncidentStore.open(tmp_path)
    stack.callback(store.close)
    one = Gated(Fleet(store, linger_s=1), AttachCounter(), Limits())
    one.begun, one.gate, one.made = threading.Event(), threading.Event(), 0
    return one


def play(collector, story):
    async def reported():
        shared = Scrapes(collector)
        try:
            return await asyncio.wait_for(story(shared), PATIENCE_S)
        finally:
            collector.gate.set()
            shared.close()

    return asyncio.run(reported())


async def begun(collector):
    assert await asyncio.to_thread(collector.begun.wait, PATIENCE_S)


async def others_turns():
    """Run every other task of the loop as far as it gets without the collector."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_scrapes_that_wait_for_the_same_share_a_text_of_a_later_moment(collector):
    async def story(shared):
        first = asyncio.create_task(shared.text(Form(PROMETHEUS)))
        await begun(collector)
        others = [asyncio.create_task(shared.text(Form(PROMETHEUS))) for _ in range(200)]
        await others_turns()
        collector.gate.set()
        return await first, {id(text) for text in await asyncio.gather(*others)}

    text, others = play(collector, story)
    assert b"hookd_" in text
    assert (len(others), collector.made) == (1, 2)


def test_a_compressed_text_is_shared_with_nobody_who_has_not_asked_for_it(collector):
    async def story(shared):
        first = asyncio.create_task(shared.text(Form(PROMETHEUS)))
        await begun(collector)
        others = [asyncio.create_task(shared.text(Form(PROMETHEUS, is_gzip=is_gzip))) for is_gzip in (True, False)]
        await others_turns()
        collector.gate.set()
        return (await asyncio.gather(first, *others))[1:]

    compressed, plain = play(collector, story)
    assert plain.startswith(b"# HELP hookd_")
    assert gzip.decompress(compressed).startswith(b"# HELP hookd_")


def test_however_many_unusual_ones_wait_a_prometheus_is_answered_next_but_one(collector):
    async def story(shared):
        order = []

        async def ask(name, form):
            await shared.text(form)
            order.append(name)

        tasks = [asyncio.create_task(ask("first", Form("")))]
        await begun(collector)
        tasks += [asyncio.create_task(ask(n, Form("", frozenset({f"x{n}"})))) for n in range(scrapes.MAX_WAITING)]
        await others_turns()
        with pytest.raises(BusyError):
            await shared.text(Form("", frozenset({"one more"})))
        tasks.append(asyncio.create_task(ask("prometheus", Form(PROMETHEUS, is_gzip=True))))
        await others_turns()
        collector.gate.set()
        await asyncio.gather(*tasks)
        return order

    assert play(collector, story)[:3] == ["first", 0, "prometheus"]


@pytest.mark.parametrize(
    "accept", ["", "*/*", PROMETHEUS, "text/plain;version=0.0.4", "application/openmetrics-text;version=1.0.0"]
)
def test_what_a_prometheus_asks_for_is_usual(accept):
    assert Form(accept).is_usual


def test_kinds_without_number_are_unusual():
    assert not Form("application/openmetrics-text; version=77.1.0").is_usual
    assert not Form("", frozenset({"hookd_steps"})).is_usual
    assert Form("a, b").key == Form("*/*").key, "only the format counts, not how it is asked for"
