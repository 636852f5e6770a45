"""`hookd plugin config` makes a new object in the old one's place: to Prometheus nothing begins anew."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hookd.testing import Training
from tests.plugins.test_readme import GENERATOR, PLUGINS


def eventful() -> Training:
    """One that gives each plugin something to count: modes, a NaN, gradients to clip."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 4))

    def batch(step: int) -> tuple[torch.Tensor]:
        model.train(step % 2 == 0)
        return (torch.full((4, 8), torch.nan) if step == 2 else torch.full((4, 8), 100.0),)

    return Training(model, batch, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))


def counters(target) -> dict[tuple[str, tuple[str, ...]], float]:
    return {
        (family.name, series.values): series.cells[0]
        for family in target.read().families
        if family.kind == "counter"
        for series in family.series
    }


@pytest.mark.parametrize("plugin", PLUGINS)
def test_no_counter_falls_when_a_plugin_gets_other_options(fake_target, plugin):
    training = eventful()
    fake_target.start(plugin, **GENERATOR.EVERYTHING.get(plugin, {}))
    parts = fake_target._parts
    for _ in range(4):
        training.step()
    before = counters(fake_target)
    old = parts.registry.named(plugin)
    new = parts.loading.ready(type(old.plugin)(), {**old.context.options, "readmit": "true"}, by_name=True, old=old)
    parts.loading.switch(old, new)
    training.step()  # hookd's own thread lets the old one go while the training goes on
    between = counters(fake_target)
    parts.loading.discard(old, new)
    fake_target.tick()
    after = counters(fake_target)
    training.step()
    fake_target.tick()
    for earlier, later in ((before, between), (between, after), (after, counters(fake_target))):
        fallen = {key: (value, later.get(key)) for key, value in earlier.items() if later.get(key, -1.0) < value}
        assert not fallen
    assert any(value for (family, _), value in before.items() if family.startswith(f"hookd_{plugin}_")) or plugin in (
        "activations", "capture", "drift", "fingerprint", "learning", "memory"
    ), before  # fmt: skip
