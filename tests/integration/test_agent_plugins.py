"""How plugins are taken in, ordered, guarded and thrown out."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from torch import nn

from hookd import Plugin, PluginError, hookimpl
from hookd.target.plugins.plugin_memory import size_of
from tests.support.agent import running
from tests.support.processes import wait_until

CALLS: list[str] = []


class First(Plugin):
    name = "first"

    @hookimpl
    def forward(self, module):
        CALLS.append("first")


class Second(Plugin):
    name = "second"

    @hookimpl(tryfirst=True)
    def forward(self, module):
        CALLS.append("second")


class Last(Plugin):
    name = "last"

    @hookimpl(trylast=True)
    def forward(self, module):
        CALLS.append("last")


def test_order_is_pluggys() -> None:
    CALLS.clear()
    with running(Second, First, Last):
        nn.Identity()(torch.ones(1))
    assert CALLS == ["second", "first", "last"]


class Misspelt(Plugin):
    name = "misspelt"

    @hookimpl
    def foward(self, module):
        pass


class WrongArgument(Plugin):
    name = "wrong"

    @hookimpl
    def forward(self, modul):
        pass


class WithDefault(Plugin):
    name = "defaulting"

    @hookimpl
    def forward(self, module=None):
        pass


class Wrapping(Plugin):
    name = "wrapping"

    @hookimpl(wrapper=True)
    def forward(self, module):
        return (yield)


class CoreName(Plugin):
    name = "steps"


class Configuring(Plugin):
    name = "configuring"

    @hookimpl
    def configure(self, context):
        context.option("norm", 1.0, least=0, most=2.5)
        context.option("kept", 4, least=1)
        context.option("share", 0.5, most=1)
        context.counter("calls", "Calls.", ["module"])


@pytest.mark.parametrize(
    ("plugin", "text", "hint"),
    [
        (Misspelt, "no hook 'foward'", "'forward'"),
        (WrongArgument, "no argument 'modul'", "module"),
        (WithDefault, "a default", ""),
        (Wrapping, "wrapper", ""),
        (CoreName, "cannot be a plugin's name", ""),
    ],
)
def test_a_plugin_that_breaks_a_rule_is_refused_with_the_reason(plugin: type[Plugin], text: str, hint: str) -> None:
    original = nn.Module.__call__
    with pytest.raises(PluginError, match=text) as caught, running(plugin):
        pass
    assert hint in caught.value.hint
    assert nn.Module.__call__ is original


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("norm", "x", "a number"),
        ("norm", "2.6", "configuring: norm must be at least 0 and at most 2.5, not 2.6"),
        ("norm", "-0.1", "at least 0 and at most 2.5, not -0.1"),
        ("norm", "nan", "at least 0 and at most 2.5, not nan"),
        ("kept", "0", "kept must be at least 1, not 0"),
        ("share", "1.5", "share must be at most 1, not 1.5"),
        ("nrom", "1", "no such option"),
        ("every", "x", "a whole number"),
        ("every", "0", "at least 1"),
    ],
)
def test_wrong_options_are_refused(key: str, value: str, text: str) -> None:
    with pytest.raises(PluginError, match=text), running(Configuring, options={key: value}):
        pass


class Raising(Plugin):
    name = "raising"

    @hookimpl
    def forward(self, module):
        raise KeyError("planted")


def test_a_plugin_that_raises_is_counted_logged_once_and_quarantined() -> None:
    net = nn.Identity()
    with running(Raising, First) as agent:
        CALLS.clear()
        for _ in range(15):
            net(torch.ones(1))
        assert agent.state("raising") == "quarantined"
        assert agent.values("hookd_plugin_errors")[("raising",)] == Raising.max_errors
        assert agent.values("hookd_plugin_state")[("raising", "quarantined")] == 1
        assert len([log for log in agent.read().logs if "planted" in log["message"]]) == 1
        assert [i["kind"] for i in agent.read().incidents] == ["quarantine"]
        assert CALLS == ["first"] * 15


class Unspeakable(Exception):  # noqa: N818
    def __str__(self):
        raise RuntimeError("asked for its words")


class RaisingUnspeakably(Plugin):
    name = "unspeakable"

    @hookimpl
    def forward(self, module):
        raise Unspeakable

    @hookimpl
    def unconfigure(self):
        raise Unspeakable


def test_an_error_that_cannot_be_worded_goes_no_further_than_any_other() -> None:
    with running(RaisingUnspeakably, First) as agent:
        CALLS.clear()
        nn.Identity()(torch.ones(1))
        assert agent.values("hookd_plugin_errors")[("unspeakable",)] == 1
        assert CALLS == ["first"]


class Sparse(Plugin):
    name = "sparse"

    @hookimpl
    def configure(self, context):
        self.context = context

    @hookimpl
    def forward(self, output):
        self.dead = weakref.proxy(nn.Identity())
        self.context.later([output.to_sparse()], CALLS.append)


class Reading(Plugin):
    name = "reading"

    @hookimpl
    def configure(self, context):
        self.context = context

    @hookimpl
    def forward(self, output):
        self.context.later([output], lambda numbers: CALLS.append(("read", numbers)))

    @hookimpl
    def tick(self, now_s):
        CALLS.append("tick")


def test_what_one_plugin_cannot_have_read_later_costs_the_others_and_the_step_nothing() -> None:
    """hookd cannot look at the plugin's attributes either; its own thread goes on."""
    with running(Sparse, Reading) as agent:
        CALLS.clear()
        layer = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
        for _ in range(3):
            layer(torch.ones(1)).backward()
            optimizer.step()
        assert agent.values("hookd_steps") == {(): 3}
        assert agent.values("hookd_plugin_errors") == {("sparse",): 3, ("reading",): 0}
        assert ("read", layer(torch.ones(1)).tolist()) in CALLS
        for _ in range(40):  # the memory watch checks the plugins' tensors now and then
            agent.agent.parts.ticks.tick(0.0)
        assert CALLS.count("tick") >= 40


class Exiting(Plugin):
    name = "exiting"

    @hookimpl
    def configure(self, context):
        raise SystemExit(3)


def test_a_plugin_that_exits_when_it_is_configured_is_refused() -> None:
    with pytest.raises(PluginError, match="configure raised SystemExit: 3"), running(Exiting):
        pass


class Returning(Plugin):
    name = "returning"

    @hookimpl
    def forward(self, output):
        return output * 2


def test_what_an_observer_returns_is_ignored_and_counted() -> None:
    with running(Returning) as agent:
        assert nn.Identity()(torch.ones(1)).item() == 1.0
        assert agent.values("hookd_plugin_errors")[("returning",)] == 1


class CallingModules(Plugin):
    name = "calling"

    @hookimpl
    def forward(self, module, inputs):
        module.torch()(*inputs)


def test_modules_that_a_plugin_calls_are_not_observed() -> None:
    net = nn.Identity()
    with running(First, CallingModules) as agent:
        CALLS.clear()
        net(torch.ones(1))
        assert CALLS == ["first"]
        assert agent.state("calling") == "active"


class Doubling(Plugin):
    name = "doubling"
    mutates = True

    @hookimpl
    def forward(self, output):
        if output.sum() < 0:
            raise ValueError("planted")
        return output * 2


def test_a_mutating_plugin_is_disarmed_by_its_first_error() -> None:
    net = nn.Identity()
    with running(Doubling) as agent:
        assert net(torch.ones(1)).item() == 2.0
        assert net(-torch.ones(1)).item() == -1.0
        assert agent.state("doubling") == "quarantined"
        assert net(torch.ones(1)).item() == 1.0


def test_a_mutating_plugin_must_be_enabled_by_name() -> None:
    with running(First) as agent, pytest.raises(PluginError, match="by name"):
        agent.parts.loading.load(Doubling(), {}, by_name=False)


def test_a_plugin_can_be_unloaded_and_its_series_end() -> None:
    net = nn.Identity()
    with running(First, Configuring) as agent:
        net(torch.ones(1))
        assert "hookd_configuring_calls" in [f.name for f in agent.read().families]
        agent.parts.loading.unload("configuring")
        assert "hookd_configuring_calls" not in [f.name for f in agent.read().families]
        agent.parts.loading.unload("first")
        CALLS.clear()
        net(torch.ones(1))
        assert CALLS == []


class Recovers(Plugin):
    """Fails in its first calls, as far as `fails` says."""

    name = "recovers"
    max_errors = 2
    fails = 0

    @hookimpl
    def configure(self, context):
        self.calls = context.counter("calls", "Calls.").labels()

    @hookimpl
    def forward(self, module):
        if type(self).fails > 0:
            type(self).fails -= 1
            raise ValueError("not yet")
        self.calls.inc()


class Steady(Recovers):
    name = "steady"

    @hookimpl
    def forward(self, module):
        self.calls.inc()


def test_what_was_quarantined_comes_back_on_probation_each_time_later(monkeypatch) -> None:
    monkeypatch.setattr("hookd.target.plugins.listeners.BACK_OFF_S", 0.05)
    monkeypatch.setattr(Recovers, "fails", 3)
    module = nn.Identity()
    with running(Recovers, Steady) as agent:
        entry = agent.parts.registry.named("recovers")
        for _ in range(2):
            module(torch.ones(1))
        assert agent.state("recovers") == "quarantined"
        module(torch.ones(1))
        assert Recovers.fails == 1, "it is not called"
        wait_until(lambda: agent.state("recovers") == "active", what="its readmission")
        module(torch.ones(1))
        assert agent.state("recovers") == "quarantined", "one error is enough on probation"
        assert entry.probation._wait_s == pytest.approx(0.1)
        wait_until(lambda: agent.state("recovers") == "active", what="its readmission")
        module(torch.ones(1))
        assert agent.values("hookd_recovers_calls")[()] == 1
        assert agent.values("hookd_plugin_errors")["recovers",] == 3
        reported = [one["again_s"] for one in agent.read().incidents if one["kind"] == "quarantine"]
        assert reported == pytest.approx([0.05, 0.1])
        assert agent.values("hookd_steady_calls")[()] == 5, "the other one is called each time"


@pytest.mark.parametrize("how", ["class", "option", "mutates"])
def test_some_stay_out(monkeypatch, how) -> None:
    monkeypatch.setattr("hookd.target.plugins.listeners.BACK_OFF_S", 0.001)
    monkeypatch.setattr(Recovers, "fails", 9)
    monkeypatch.setattr(Recovers, "readmit", how != "class")
    monkeypatch.setattr(Recovers, "mutates", how == "mutates")
    with running(Recovers, options={"readmit": "false"} if how == "option" else None) as agent:
        for _ in range(2):
            nn.Identity()(torch.ones(1))
        ticks = agent.values("hookd_agent_ticks")
        wait_until(lambda: agent.values("hookd_agent_ticks") != ticks, what="a tick")
        agent.parts.ticks.tick(0.0)
        assert agent.state("recovers") == "quarantined"


class Talkative(Plugin):
    name = "talkative"

    @hookimpl
    def configure(self, context):
        self.texts = context.counter("texts", "Texts.", ["text"])
        self.kinds = context.gauge("kinds", "Kinds.", ["module", "kind"])
        self.number = 0

    @hookimpl
    def forward(self, module):
        self.number += 1
        self.texts.labels(f"step {self.number}").inc()
        self.kinds.labels(f"module {self.number}", "a").set(1.0)


def test_labels_that_are_new_for_ever_are_bounded_and_counted() -> None:
    module = nn.Identity()
    with running(Talkative, Steady) as agent:
        for _ in range(600):
            module(torch.ones(1))
        assert len(agent.values("hookd_talkative_texts")) == 500
        assert len(agent.values("hookd_talkative_kinds")) == 600, "modules are as many as there are"
        assert agent.values("hookd_steady_calls")[()] == 600
        wait_until(lambda: agent.values("hookd_plugin_series_refused").get(("talkative",)) == 100, what="the count")
        (line,) = [one for one in agent.read().logs if "talkative" in str(one)]
        assert "hookd_talkative_texts has 500 series" in str(line)
        plugin = agent.plugin("talkative")
        for number in range(1, 11):
            plugin.texts.remove(f"step {number}")
        for _ in range(20):
            module(torch.ones(1))
        assert len(agent.values("hookd_talkative_texts")) == 500, "those that end make room"


class Careless(Plugin):
    """Hands on whatever it has calculated."""

    name = "careless"

    @hookimpl
    def configure(self, context):
        self.amounts = context.counter("amounts", "Amounts.")
        self.sizes = context.histogram("sizes", "Sizes.", buckets=[-1.0, 1.0])

    @hookimpl
    def forward(self, module):
        for value in (1.0, math.nan, 2.0, math.inf, -math.inf, -1.0):
            self.amounts.inc(value)
            self.sizes.observe(value)


def test_what_is_no_amount_is_counted_and_not_stored() -> None:
    with running(Careless) as agent:
        nn.Identity()(torch.ones(1))
        bad = lambda: agent.values("hookd_plugin_bad_values")  # noqa: E731
        wait_until(bad, what="the count")
        assert bad() == {("careless", "hookd_careless_amounts"): 4, ("careless", "hookd_careless_sizes"): 1}
        assert agent.values("hookd_careless_amounts") == {(): 3}
        (sizes,) = [one for one in agent.read().families if one.name == "hookd_careless_sizes"]
        ((_, cells),) = sizes.series
        assert list(cells) == [2, 1, 2, 2.0], "-1 and -infinity; 1; 2 and infinity; the sum is of what is finite"
        messages = [one["message"] for one in agent.read().logs if "is not stored" in one["message"]]
        assert messages == [
            f"plugin careless: hookd_careless_{name} was given an invalid amount: it is not stored"
            for name in ("amounts", "sizes")
        ]


def test_a_series_for_which_the_page_has_no_space_is_counted_once(fake_target, monkeypatch) -> None:
    fake_target.start(Talkative)
    monkeypatch.setattr("hookd.wire.page.series.MAX_SERIES", 0)
    nn.Identity()(torch.ones(1))
    monkeypatch.undo()
    dropped = fake_target.read().dropped
    assert dropped >= 2, "one of each metric"
    for _ in range(3):
        fake_target.tick()
        assert fake_target.value("series_dropped") == dropped


def test_a_plugin_made_anew_counts_on_how_many_of_its_series_were_refused(fake_target) -> None:
    fake_target.start(Talkative)
    module = nn.Sequential(nn.Identity())

    def refused() -> float:
        fake_target.tick()
        return fake_target.value("plugin_series_refused", "talkative")

    for _ in range(300):
        module(torch.ones(1))
    assert refused() == 100
    fake_target.renew("talkative")
    for _ in range(10):
        module(torch.ones(1))
    assert refused() >= 100


def test_what_a_plugin_says_beside_an_incident_is_not_taken_for_what_hookd_says(fake_target) -> None:
    class Liar(Steady):
        @hookimpl
        def configure(self, context):
            super().configure(context)
            context.incident("strange", "message", plugin="another", rows=3)

    fake_target.start(Liar)
    (incident,) = [one for one in fake_target.incidents if one.kind == "strange"]
    assert (incident.plugin, incident.step, incident.fields) == ("steady", 1, {"rows": 3})


class Part:
    def __init__(self, tensor):
        self.tensor = tensor


class Hoards(Plugin):
    name = "hoards"

    @hookimpl
    def configure(self, context):
        self.kept = {"parts": []}

    @hookimpl
    def forward(self, module):
        self.kept["parts"].append(Part(torch.zeros(1000)))


class HoardsAndChanges(Hoards):
    name = "changing"
    mutates = True


def test_what_keeps_more_and_more_is_quarantined(monkeypatch) -> None:
    monkeypatch.setattr("hookd.target.plugins.plugin_memory.EVERY_TICKS", 1)
    monkeypatch.setattr("hookd.target.plugins.plugin_memory.MEASUREMENTS", 2)
    monkeypatch.setattr("hookd.target.plugins.plugin_memory.LIMIT_BYTES", 9000)
    module = nn.Identity()
    with running(Hoards, HoardsAndChanges, Steady) as agent:

        def is_noticed():
            module(torch.ones(1))
            kinds = [one["kind"] for one in agent.read().incidents]
            return agent.state("hoards") == "quarantined" and "plugin_memory" in kinds

        wait_until(is_noticed, what="the growth")
        assert agent.state("changing") == agent.state("steady") == "active"
        (incident,) = [one for one in agent.read().incidents if one["kind"] == "quarantine"]
        assert "MB in tensors and" in incident["message"]
        assert incident["plugin"] == "hoards"
        kept = len(agent.plugin("hoards").kept["parts"])
        assert size_of(agent.plugin("hoards")) == (4000 * kept, kept + 1)


def test_one_that_keeps_much_and_no_more_is_left_alone(monkeypatch) -> None:
    monkeypatch.setattr("hookd.target.plugins.plugin_memory.LIMIT_BYTES", 100)
    with running(Hoards) as agent:
        nn.Identity()(torch.ones(1))
        watch = agent.parts.memory_watch
        for _ in range(10):
            watch._measure(agent.parts.registry.named("hoards"))
        assert agent.state("hoards") == "active"
        assert agent.values("hookd_plugin_held_bytes")["hoards",] == 4000


def test_a_complex_gradient_that_cannot_be_clamped_is_refused_before_any_is_changed():
    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.real, self.wave = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.complex64))

        def forward(self) -> torch.Tensor:
            return 9 * self.real.sum() + 9 * self.wave.abs().sum()

    model = Waves()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with running("gradclip", options={"mode": "value", "clip_value": "0.5"}) as agent:
        model().backward()
        optimizer.step()
        assert model.real.grad.tolist() == [9.0, 9.0]
        assert agent.state("gradclip") == "quarantined"
        (messages,) = [one["message"] for one in agent.read().incidents if one["kind"] == "quarantine"]
        assert "cannot clamp the complex gradient of wave" in messages
