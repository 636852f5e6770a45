"""Statistics of what modules return, put into gauges: in C where calls are entered there, and the same by the patch in Python."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hookd import Plugin, PluginError, hookimpl
from hookd.api.shown import STATISTICS
from tests.support.agent import running

OUTPUTS = {
    "plain": torch.randn(8, 16),
    "double": torch.randn(8, 16, dtype=torch.float64),
    "bfloat16": torch.randn(8, 16).bfloat16(),
    "half": torch.randn(8, 16).half(),
    "zeros": torch.zeros(4),
    "negative zero": torch.tensor([-0.0, -0.0]),
    "constant": torch.full((1000,), 0.1),
    "not finite": torch.tensor([1.0, math.nan, math.inf, -math.inf, -2.0]),
    "nothing finite": torch.tensor([math.nan, -math.inf]),
    "transposed": torch.randn(8, 16).t(),
    "every second": torch.randn(8, 16)[:, ::2],
    "large": torch.randn(1 << 17),
    "read without the lock": torch.randn((1 << 21) + 3),
    "with others": (None, torch.arange(3), torch.randn(5)),
    "whole numbers": torch.arange(5),
    "empty": torch.empty(0),
    "of gradients": torch.randn(4, requires_grad=True) * 2,
}


class Giving(nn.Module):
    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self):
        return self.output


class Model(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.parts = nn.ModuleList(map(Giving, outputs))

    def forward(self):
        outputs = [part() for part in self.parts]
        return outputs[0]


class Shows(Plugin):
    name = "shows"
    sampled = ("output_summary",)

    @hookimpl
    def configure(self, context):
        self.context, self.reported = context, []
        gauges = {name: context.gauge(name, "One.", ["module"]) for name in STATISTICS}
        self.outputs = context.show_outputs(gauges, zeros=0.5)

    @hookimpl
    def output_summary(self, module, summary):
        self.reported.append((module.name, summary.zero_ratio))


def shown(agent, module: str) -> dict[str, float]:
    found = {name: agent.values(f"hookd_shows_{name}") for name in STATISTICS}
    return {name: values[module,] for name, values in found.items() if (module,) in values}


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("name", OUTPUTS)
def test_what_is_shown_is_what_a_summary_says(name) -> None:
    with running(Shows, budget=100.0) as agent:
        net, context = Model([OUTPUTS[name]]), agent.plugin("shows").context
        for _ in range(2):
            net()
        found = shown(agent, "parts.0")
        tensors = [
            one for one in (OUTPUTS[name] if type(OUTPUTS[name]) is tuple else (OUTPUTS[name],)) if one is not None
        ]
        real = next((one for one in tensors if one.is_floating_point() and one.numel()), None)
        if real is None:
            assert found == {}, "of what nothing was looked at there is no series"
        else:
            summary = context.summary(real.detach())
            assert str(found) == str({one: float(getattr(summary, one)) for one in STATISTICS})


@pytest.mark.usefixtures("either_way")
def test_a_plugin_is_notified_of_many_zeros_and_of_their_end() -> None:
    with running(Shows, budget=100.0) as agent:
        net = Model([torch.ones(4), torch.ones(4)])
        for zeros in (0, 1, 2, 4, 0, 0):
            net.parts[1].output = torch.tensor([0.0] * zeros + [1.0] * (4 - zeros))
            net()
        assert agent.plugin("shows").reported == [("parts.1", 0.5), ("parts.1", 1.0), ("parts.1", 0.0)]
        assert agent.state("shows") == "active"


@pytest.mark.usefixtures("either_way")
def test_in_steps_that_are_not_sampled_nothing_is_shown() -> None:
    class Seldom(Shows):
        every = 4

    with running(Seldom, budget=100.0) as agent:
        net = nn.Sequential(nn.Linear(2, 2), nn.Identity())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        means = []
        for step in range(8):
            net[1].forward = lambda x, step=step: x * 0 + step
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            means.append(shown(agent, "1")["mean"])
        assert len(set(means)) == 2, "of one step in four"
        agent.plugin("shows").context.listen("output_summary", wanted=False)
        for _ in range(8):
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        assert shown(agent, "1")["mean"] == means[-1]


def test_it_is_done_without_a_call_of_python(monkeypatch) -> None:
    with running(Shows, budget=100.0) as agent:
        if not agent.plugin("shows").context.shows_in_c:
            pytest.skip("calls are not entered in C")
        net, asked, dispatch = Model([torch.ones(4), torch.ones(4)]), [], agent.parts.dispatch
        net()
        monkeypatch.setattr(dispatch, "switched_on", lambda *given: asked.append(given) or [])
        net.parts[0].output, net.parts[1].output = torch.full((1 << 17,), 3.0), torch.ones(4, 4).t()
        net()
        assert [module.name for hook, module in asked if hook == "output_summary"] == ["parts.1"], (
            "what is not contiguous is left to Python"
        )
        assert shown(agent, "parts.0")["mean"] == 3.0


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("between", [torch.zeros(4, 4)[:, ::2], torch.zeros(1 << 17)], ids=["every second", "large"])
def test_a_plugin_is_notified_that_zeros_are_over_whoever_has_read_them(between) -> None:
    with running(Shows, budget=100.0) as agent:
        net = Model([torch.ones(4)])
        for output in (torch.ones(4), between, torch.ones(4), torch.ones(4)):
            net.parts[0].output = output
            net()
        reported = [zeros for name, zeros in agent.plugin("shows").reported if name == "parts.0"]
        assert reported == [1.0, 0.0]


def test_where_nothing_is_asked_nothing_is_looked_at() -> None:
    with running(Shows, budget=100.0) as agent:
        net, outputs = Model([torch.ones(4)]), agent.plugin("shows").outputs
        net()
        assert outputs.has_looked()
        assert not outputs.has_looked()
        agent.plugin("shows").context.listen("output_summary", wanted=False)
        net()
        assert not outputs.has_looked()


@pytest.mark.parametrize(
    ("gauges", "says"),
    [
        (lambda context: {"median": context.gauge("median", "One.", ["module"])}, "no such statistic: 'median'"),
        (
            lambda context: {"mean": context.gauge("mean", "One.")},
            "hookd_shows_mean is not a gauge with the single label",
        ),
        (lambda context: {"mean": context.counter("mean", "One.", ["module"])}, "is not a gauge with the single label"),
    ],
)
def test_what_cannot_be_shown_is_refused(gauges, says) -> None:
    class Wrong(Shows):
        @hookimpl
        def configure(self, context):
            context.show_outputs(gauges(context))

    with running() as agent, pytest.raises(PluginError, match=says):
        agent.parts.loading.load(Wrong(), {}, by_name=True)
