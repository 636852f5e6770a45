"""Memory of the agent: it keeps nothing of models that are gone, and only a part of a model that is too large."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import time
import weakref

import pytest
import torch
from torch import nn

from hookd import Plugin, hookimpl
from hookd.target.modeltree import models
from tests.support.agent import running
from tests.support.processes import wait_until

X = torch.ones(2, 4)


class Counts(Plugin):
    name = "counts"

    @hookimpl
    def configure(self, context):
        self.calls = context.counter("calls", "Calls of a module.", ["module"])
        self.seen: list[str] = []

    @hookimpl
    def forward(self, module):
        self.calls.labels(module.name).inc()
        self.seen.append(module.name)


def wide(modules: int) -> nn.Sequential:
    """Return a root of two levels: stages of ten layers."""
    return nn.Sequential(*[nn.Sequential(*[nn.Identity() for _ in range(10)]) for _ in range(modules // 11)])


@pytest.mark.load
def test_models_that_come_and_go_are_forgotten() -> None:
    with running(Counts, "timing", "activations") as agent:
        parts, sizes, refs = agent.parts, [], []
        for n in range(60):
            model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(1 + n % 20)])  # twenty shapes in turn
            refs.append(weakref.ref(model))
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            model(X).square().mean().backward()
            optimizer.step()
            del model, optimizer
            gc.collect()
            assert refs[-1]() is None, "nothing of ours keeps it"
            later = time.time() + 1e5 * n
            parts.ticks.tick(later)
            parts.ticks.tick(later + 999.0)  # its series go a minute after it has gone
            sizes.append(tables(parts))
        assert parts.models.names.models == []
        assert max(map(sum, sizes[20:])) <= max(map(sum, sizes[:20])), sizes
        assert not [values for values in agent.values("hookd_timing_forward_calls") if values != ("(root)",)]


def tables(parts) -> list[int]:
    known = parts.models
    containers = [
        known.plans,
        known.names.known,
        known._ignored,
        parts.portions.changed,
        parts.portions._candidates,
        known.routing._selections,
        known.coverage._called,
    ]
    contexts = [entry.context for entry in parts.registry.loaded.values()]
    containers += [table for context in contexts for table in context.requests.tables]
    return [len(one) for one in containers] + [parts.page._series_count, len(parts.page._modules)]


def test_a_large_model_is_observed_near_its_root(monkeypatch) -> None:
    monkeypatch.setattr(models, "MOST", 60)
    monkeypatch.setattr(models, "OF_LARGER", 30)
    model = wide(220)
    with running(Counts) as agent:
        model(X)
        names = [f"{n}" for n in range(20)] + [f"0.{n}" for n in range(9)]
        assert sorted(agent.plugin("counts").seen) == sorted([*names, "(root)"])
        model(X)
        states = agent.values("hookd_modules")
        agent.parts.models.coverage.publish()
        assert agent.values("hookd_modules")["left_out",] == 20 * 11 + 1 - 30, states
        assert [entry["level"] for entry in agent.read().logs if "more than 60 modules" in entry["message"]] == [
            "warning"
        ]
        ignored = agent.parts.models._ignored
        del model
        gc.collect()
        assert not ignored


def test_a_model_of_the_largest_size_is_observed_whole(monkeypatch) -> None:
    model = wide(220)
    monkeypatch.setattr(models, "MOST", 221)
    monkeypatch.setattr(models, "OF_LARGER", 30)
    with running(Counts) as agent:
        model(X)
        assert len(agent.plugin("counts").seen) == 221


def test_a_module_that_stands_in_many_places_counts_once(monkeypatch) -> None:
    monkeypatch.setattr(models, "MOST", 4)
    monkeypatch.setattr(models, "OF_LARGER", 2)
    model = nn.Sequential(*[nn.Identity()] * 9, nn.Identity())
    model[0].owner = model  # a module below itself
    with running(Counts) as agent:
        model(X)
        assert set(agent.plugin("counts").seen) == {"(root)", "0", "9"}
        assert not [entry for entry in agent.read().logs if "modules" in entry["message"]]


def test_what_is_left_out_is_noted_in_portions(monkeypatch) -> None:
    monkeypatch.setattr(models, "MOST", 60)
    monkeypatch.setattr(models, "OF_LARGER", 30)
    monkeypatch.setattr(models, "_LEFT_AT_ONCE", 50)
    monkeypatch.setattr(models, "_PORTION_NS", 1 << 60)  # a slow machine has the same portions
    model = wide(220)
    with running(Counts, method="attach") as agent:
        counts = []
        for _ in range(12):
            model(X)
            counts.append(agent.parts.models.left_out())
        assert counts[-1] == 221 - 30
        assert max(b - a for a, b in itertools.pairwise([0, *counts])) <= 50
        assert not agent.parts.models.learning


def test_what_changes_the_training_is_armed_in_all_of_a_large_model(monkeypatch) -> None:
    monkeypatch.setattr(models, "MOST", 20)
    monkeypatch.setattr(models, "OF_LARGER", 10)

    class Doubles(Plugin):
        name = "doubles"
        mutates = True

        @hookimpl
        def forward(self, output):
            return output * 2

    model = nn.Sequential(*[nn.Identity() for _ in range(40)])
    with running(Counts, Doubles):
        assert model(X)[0, 0] == 2.0**41
    with running(Counts) as agent:
        model(X)
        assert len(agent.plugin("counts").seen) == 10
        agent.parts.loading.load(Doubles(), {}, by_name=True)
        assert model(X)[0, 0] == 2.0**41


def test_nothing_of_an_agent_is_left_when_it_has_gone() -> None:
    class Calls(Plugin):
        name = "calls"

        @hookimpl
        def forward(self, module):
            pass

    with running(Calls) as agent:
        nn.Sequential(nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()
        parts = [weakref.ref(part) for part in (agent.parts, *own(agent.parts))]
    del agent, Calls
    wait_until(lambda: gc.collect() >= 0 and not any(ref() for ref in parts), what="the end of all parts")


def own(parts) -> list[object]:
    """Return those parts that are objects of hookd's own."""
    found = [getattr(parts, field.name) for field in dataclasses.fields(parts)]
    return [one for one in found if type(one).__module__.startswith("hookd.") and type(one).__weakrefoffset__]
