"""Faults of plugins outside their events (hooks that never return, ever new kinds of incidents) harm nobody else."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest
import torch
from torch import nn

from hookd import Plugin, PluginError, TrainingError, hookimpl
from hookd.target.boot import bootstrap
from hookd.target.boot.spawn import OWN, Thread, is_own
from hookd.target.plugins import slow_hooks
from hookd.target.plugins.global_state import FIRST_CALLS
from tests.support.agent import running
from tests.support.processes import PATIENCE_S, wait_until

RELEASE, LOOKED = threading.Event(), threading.Event()


@pytest.fixture(autouse=True)
def released():
    """Release at the end whatever is stuck in a test."""
    before = OWN.copy()
    RELEASE.clear()
    yield
    RELEASE.set()
    wait_until(lambda: not OWN - before, what="the end of our threads")


@pytest.fixture
def impatient(monkeypatch):
    """Make hookd wait less than half a second for stuck hooks; all others are quicker, even on a busy machine."""
    monkeypatch.setattr("hookd.target.plugins.lifecycle_hooks.TIME_S", 0.4)
    monkeypatch.setattr("hookd.target.plugins.lifecycle_hooks.SHORT_S", 0.2)


class Steady(Plugin):
    name = "steady"

    @hookimpl
    def configure(self, context):
        self.calls = context.counter("calls", "Calls.").labels()
        self.ticks = context.counter("ticks", "Ticks.").labels()

    @hookimpl
    def forward(self, module):
        self.calls.inc()

    @hookimpl
    def tick(self):
        self.ticks.inc()


def waits():
    RELEASE.wait()


class Ticking(Steady):
    name = "ticking"

    @hookimpl
    def tick(self):
        waits()

    @hookimpl
    def unconfigure(self):
        waits()


def test_a_tick_that_never_returns_is_quarantined_and_the_agent_detaches(impatient) -> None:
    original = nn.Module.__call__
    with running(Ticking, Steady) as agent:
        wait_until(lambda: agent.state("ticking") == "quarantined", what="its quarantine")
        ticks = agent.values("hookd_steady_ticks")
        wait_until(lambda: agent.values("hookd_steady_ticks") != ticks, what="the others' ticks")
        nn.Identity()(torch.ones(1))
        assert agent.values("hookd_steady_calls") == {(): 1}
        assert agent.values("hookd_ticking_calls") == {(): 0}
        (incident,) = agent.read().incidents
        assert "tick has not returned in time: it is at" in incident["message"]
        assert "in waits: RELEASE.wait()" in incident["message"]
        entry = agent.parts.registry.named("ticking")
        assert entry.last_error["where"].endswith("in waits: RELEASE.wait()")
        entry.probation.until = 0.0
        agent.parts.ticks.tick(0.0)
        assert agent.state("ticking") == "quarantined", "it is not readmitted while its thread is stuck"
        result = bootstrap.stop()
    assert result["restored"] == "identity"
    assert [one.partition(", at ")[0] for one in result["residue"]] == [
        "a thread in the hook tick of the plugin ticking", "a thread in the hook unconfigure of the plugin ticking"
    ]  # fmt: skip
    assert nn.Module.__call__ is original


class Configuring(Steady):
    name = "configuring"

    @hookimpl
    def configure(self, context):
        waits()


class Changing(Steady):
    name = "changing"

    @hookimpl
    def configure(self, context):
        context.option("stuck", default=False)
        super().configure(context)

    def changed(self, options, given):
        return waits() or {**options, **given}

    @hookimpl
    def succeed(self, predecessor):
        waits()


class Choosy(Steady):
    name = "choosy"

    @hookimpl
    def select(self, module):
        return waits() or True


def test_what_never_returns_when_a_plugin_is_loaded_or_changed_is_reported_with_its_line(impatient) -> None:
    module = nn.Identity()
    with running(Steady, Changing) as agent:
        module(torch.ones(1))
        with pytest.raises(PluginError, match=r"configure has not returned in time: it is at .*in waits") as caught:
            agent.parts.loading.load(Configuring(), {}, by_name=True)
        assert caught.value.reason == "stuck"
        assert not agent.parts.registry.has("configuring")
        with pytest.raises(PluginError, match="changing: changed has not returned in time"):
            agent.agent._configure({"name": "changing", "options": {"stuck": "true"}})
        old = agent.parts.registry.named("changing")
        agent.parts.loading.switch(old, agent.parts.loading.ready(Changing(), {}, by_name=True, old=old))
        assert agent.values("hookd_plugin_state")["changing", "quarantined"] == 1, "its succeed is stuck"
        (refusal,) = loaded_by_a_tool(agent, Choosy(), meanwhile=lambda: nn.Identity()(torch.ones(1)))
        assert refusal.reason == "stuck"
        assert "choosy: select has not returned in time: it is at" in str(refusal)
        for each in (module, nn.Identity()):
            each(torch.ones(1))
        assert not agent.parts.registry.has("choosy")
        assert ("choosy",) not in agent.values("hookd_plugin_errors")
        assert agent.values("hookd_steady_calls") == {(): 4}


def loaded_by_a_tool(agent, plugin, meanwhile=lambda: None) -> list:
    """Load a plugin in a thread of hookd's own, as a tool does; return the refusal, if there is one."""
    refusals = []

    def load():
        try:
            agent.parts.loading.load(plugin, {}, by_name=True)
        except PluginError as error:
            refusals.append(error)

    thread = Thread(load)
    thread.start()
    meanwhile()
    thread.join(PATIENCE_S)
    return refusals


class Asked(Steady):
    name = "asked"

    @hookimpl
    def select(self, module):
        assert not bootstrap._agent.parts.models.lock._is_owned()
        self.threads.append((is_own(), module.name))
        if module.name == "1":
            raise ValueError("planted")
        return module.name != "0"

    @hookimpl
    def configure(self, context):
        super().configure(context)
        self.context, self.threads = context, []


def test_what_a_plugin_wants_of_a_known_model_is_asked_without_the_plans_lock_and_once() -> None:
    model = nn.Sequential(*[nn.Identity() for _ in range(3)])
    with running(Steady) as agent:
        model(torch.ones(1))
        plugin = Asked()
        assert not loaded_by_a_tool(agent, plugin)
        model(torch.ones(1))
        assert plugin.threads == [(True, name) for name in ("(root)", "0", "1", "2")]
        assert agent.values("hookd_asked_calls") == {(): 2}, "the root and the last"
        assert agent.values("hookd_plugin_errors")["asked",] == 1
        agent.parts.loading.unload("steady")
        model(torch.ones(1))
        assert len(plugin.threads) == 4
        assert agent.values("hookd_asked_calls") == {(): 4}


class Refusing(Plugin):
    """Raises in `tick`, which has nothing to do with the training."""

    name = "refusing"
    mutates = True
    error: type[BaseException] = TrainingError

    @hookimpl
    def tick(self):
        raise self.error("planted")


@pytest.mark.parametrize("error", [TrainingError, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit])
def test_what_a_tick_raises_ends_the_plugin_and_not_hookds_thread(monkeypatch, error) -> None:
    monkeypatch.setattr(Refusing, "error", error)
    with running(Refusing, Steady) as agent:
        agent.parts.ticks.tick(0.0)
        assert agent.state("refusing") == "quarantined"
        assert agent.parts.registry.named("refusing").last_error["text"] == f"{error.__name__}: planted"
        assert agent.values("hookd_steady_ticks")[()] >= 1, "the others' turn comes"


class Raising(Plugin):
    name = "raising"
    error: type[BaseException] = GeneratorExit

    @hookimpl
    def select(self, module):
        if not module.depth:
            return True
        raise self.error("planted")

    @hookimpl
    def forward(self, module):
        raise self.error("planted")

    @hookimpl
    def phase(self):
        raise self.error("planted")


@pytest.mark.parametrize("error", [KeyboardInterrupt, asyncio.CancelledError, GeneratorExit, SystemExit, StopIteration])
def test_whatever_a_plugin_raises_does_not_reach_the_training(monkeypatch, error) -> None:
    monkeypatch.setattr(Raising, "error", error)
    model = nn.Sequential(nn.Identity())
    with running(Raising, Steady) as agent:
        for _ in range(12):
            assert model(torch.ones(1)).item() == 1.0
        assert agent.state("raising") == "quarantined"
        assert agent.values("hookd_plugin_errors")["raising",] == Raising.max_errors
        assert agent.values("hookd_steady_calls") == {(): 24}
        assert agent.parts.registry.named("raising").last_error["text"] == f"{error.__name__}: planted"


class Unspeakable:
    def __str__(self):
        raise ValueError("asked for its words")


class WithOdd(Steady):
    name = "odd"

    @hookimpl
    def configure(self, context):
        context.option("odd", Unspeakable())
        super().configure(context)


def test_an_option_that_cannot_be_worded_keeps_no_other_plugin_from_being_reported() -> None:
    with running(WithOdd, Steady) as agent:
        agent.agent._tick(0.0)
        assert agent.read().identity["plugins"]["odd"]["settings"]["odd"] == "Unspeakable"
        assert "steady" in agent.read().identity["plugins"]


def test_who_goes_through_the_plugins_does_not_mind_one_that_goes() -> None:
    """The training's threads and hookd's own iterate over them at any time."""
    with running(Steady, WithOdd, Inventing) as agent:
        entries = iter(agent.parts.registry.loaded.values())
        assert next(entries).name == "steady"
        agent.parts.loading.unload("odd")
        assert [entry.name for entry in entries] == ["odd", "inventing"]
        assert not agent.parts.registry.has("odd")


class Inventing(Plugin):
    name = "inventing"

    @hookimpl
    def configure(self, context):
        self.context, self.number = context, 0

    @hookimpl
    def forward(self, module):
        self.number += 1
        self.context.incident(f"kind-{self.number}", "something new", number=self.number)


def test_kinds_of_incidents_that_are_new_for_ever_count_as_one() -> None:
    with running(Inventing) as agent:
        for _ in range(40):
            nn.Identity()(torch.ones(1))
        kinds = agent.values("hookd_incidents")
        assert len(kinds) == 33
        assert kinds["other",] == 8
        assert kinds["kind-32",] == 1
        last = agent.read().incidents[-1]
        assert (last["kind"], last["message"], last["number"]) == ("other", "kind-40: something new", 40)
        (line,) = [one["message"] for one in agent.read().logs if "kinds of incidents" in one["message"]]
        assert line.startswith("plugin inventing: 32 kinds of incidents, the next was 'kind-33'")
        agent.parts.stopper.quarantine(agent.parts.registry.named("inventing"), "as a test")
        assert agent.values("hookd_incidents")["quarantine",] == 1, "what hookd itself tells has its kind"


class Slow(Plugin):
    """Is slow in each module, so that hookd notices it after a few."""

    name = "slow"
    fast = False

    @hookimpl
    def configure(self, context):
        self.calls = context.counter("calls", "Calls.").labels()

    @hookimpl
    def forward(self, module):
        self.calls.inc()
        if not self.fast:
            self.wait()

    def wait(self):
        LOOKED.clear() or LOOKED.wait(PATIENCE_S)


class SlowToo(Slow):
    """Shares its function with the other one."""

    name = "slow_too"
    fast = True


class SlowAndSampled(Slow):
    name = "sampled"
    sampled = ("forward",)


class SlowAndChanging(Slow):
    name = "changing"
    mutates = True


@pytest.fixture
def polls(monkeypatch):
    """Make two polls enough to judge a hook, and signal LOOKED after each."""
    poll = slow_hooks.SlowHooks.poll

    def polled(self):
        before = self._polled
        poll(self)
        if self._polled != before:
            LOOKED.set()

    monkeypatch.setattr(slow_hooks, "POLLS", 2)
    monkeypatch.setattr(slow_hooks.SlowHooks, "poll", polled)


def test_what_keeps_the_training_for_seconds_is_quarantined_within_the_step(polls) -> None:
    model = nn.Sequential(*[nn.Identity() for _ in range(40)])
    with running(Slow, SlowToo, Steady, budget=0.01) as agent:
        model(torch.ones(1))
        assert agent.state("slow") == "quarantined"
        assert agent.values("hookd_slow_calls")[()] < 30
        assert agent.values("hookd_slow_too_calls") == agent.values("hookd_steady_calls") == {(): 41}
        (incident,) = agent.read().incidents
        assert (
            "plugin slow is quarantined: forward blocked training for 0.5 s within one step: it is at"
            in incident["message"]
        )
        assert "in wait: LOOKED.clear() or LOOKED.wait(PATIENCE_S)" in incident["message"]
        entry = agent.parts.registry.named("slow")
        assert (entry.errors, entry.last_error["hook"]) == (1, "forward")
        assert entry.last_error["where"].endswith("in wait: LOOKED.clear() or LOOKED.wait(PATIENCE_S)")


def test_what_is_sampled_is_called_as_seldom_as_the_budget_asks_for(polls) -> None:
    model = nn.Sequential(*[nn.Linear(1, 1) for _ in range(40)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with running(SlowAndSampled, budget=0.01) as agent:
        for _ in range(2):
            model(torch.ones(1)).backward()
            optimizer.step()
        assert agent.state("sampled") == "active"
        assert agent.parts.registry.named("sampled").interval >= 64
        assert agent.values("hookd_sampled_calls")[()] < 30, "the rest of the step goes on without it"
        assert [one for one in agent.read().logs if "is called once in" in one["message"]]


class Pausing(SlowAndChanging):
    name = "pausing"

    @hookimpl
    def configure(self, context):
        self.context = context

    @hookimpl
    def forward(self, module):
        self.context.pause()


def test_a_pause_is_nothing_that_takes_too_long(polls) -> None:
    with running(Pausing) as agent:
        thread = threading.Thread(target=nn.Identity(), args=(torch.ones(1),))
        thread.start()
        slow_hooks = agent.parts.slow_hooks
        wait_until(lambda: len(slow_hooks._polls) >= 3, what="some polls")
        assert not any(slow_hooks._polls)
        agent.parts.loading.unload("pausing")
        thread.join(PATIENCE_S)


def test_what_changes_the_training_is_reported_and_goes_on(polls) -> None:
    model = nn.Sequential(*[nn.Identity() for _ in range(8)])
    with running(SlowAndChanging) as agent:
        model(torch.ones(1))
        assert agent.state("changing") == "active"
        assert len([one for one in agent.read().logs if "changing: forward blocked" in one["message"]]) == 1


class Returning(Plugin):
    """Asks for numbers, and takes its time to use them, with a model of its own."""

    name = "returning"

    @hookimpl
    def configure(self, context):
        self.context = context
        self.mine = nn.Identity()
        self.calls = context.counter("calls", "Calls.", ["module"])

    @hookimpl
    def forward(self, module):
        self.calls.labels(module.name or module.type).inc()
        self.context.later([torch.ones(1)], self.then)

    def then(self, numbers):
        self.mine(torch.ones(1))
        for _ in range(80):
            if self.context._host._registry.named(self.name).state == "active":
                self.wait()

    def wait(self):
        LOOKED.clear() or LOOKED.wait(PATIENCE_S)


def test_what_is_called_back_with_numbers_is_the_plugins_own_and_is_noticed_when_it_takes_long(polls) -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with running(Returning) as agent:
        for _ in range(3):
            model(torch.ones(1)).backward()
            optimizer.step()
        assert set(agent.values("hookd_returning_calls")) == {("0",), ("(root)",)}, "and not what `then` calls"
        assert [root.type for root, _ in agent.parts.host.outermost_modules()] == ["Sequential"]
        assert agent.state("returning") == "quarantined"
        error = agent.parts.registry.named("returning").last_error
        assert (error["hook"], "in wait: LOOKED.clear() or LOOKED.wait(PATIENCE_S)" in error["where"]) == (
            "later",
            True,
        )
        assert not agent.parts.local.thread.busy


def test_where_no_thread_can_be_started_hooks_are_called_in_place(monkeypatch) -> None:
    def start(function):
        raise RuntimeError("can't start new thread")

    with running(Letting, Raises) as agent:
        cold, entries = agent.parts.lifecycle_hooks, agent.parts.registry
        cold.close()
        monkeypatch.setattr("hookd.wire.originals.thread.start", start)
        cold.unconfigure(entries.named("letting"))
        cold.unconfigure(entries.named("raises"))
        monkeypatch.undo()
        assert entries.named("letting").plugin.left == threading.current_thread()
        assert [one for one in agent.read().logs if "raises: unconfigure raised" in one["message"]]


class Letting(Plugin):
    name = "letting"
    left: object = None

    @hookimpl
    def unconfigure(self):
        self.left = threading.current_thread()


class Raises(Plugin):
    name = "raises"

    @hookimpl
    def unconfigure(self):
        raise ValueError("planted")


def test_a_thread_that_runs_no_python_just_now_is_not_forgotten() -> None:
    """For example, autograd's thread between two backwards: in `sys._current_frames` it looks as if it had ended."""
    with running(Slow) as agent:
        slow_hooks, state = agent.parts.slow_hooks, agent.parts.local.thread
        ended = threading.Thread(target=lambda: agent.parts.local.thread)
        ended.start()
        ended.join()
        slow_hooks._states[-1] = state

        def is_forgotten():
            slow_hooks._running()
            return ended.ident not in slow_hooks._states

        wait_until(is_forgotten, what="the end of the thread in the kernel as well")
        assert slow_hooks._states.pop(-1) is state


class Upsetting(Plugin):
    """Changes the state of the whole process at each module call."""

    name = "upsetting"
    act = staticmethod(lambda: None)

    @hookimpl
    def forward(self, module):
        self.act()


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: torch.manual_seed(1), "the random numbers"),
        (lambda: torch.rand(1), "the random numbers"),
        (random.random, "the random numbers"),
        (lambda: torch.set_grad_enabled(False), "the grad mode"),
        (lambda: torch.set_default_dtype(torch.float64), "the default dtype"),
        (lambda: torch.set_num_threads(torch.get_num_threads() + 1), "the number of threads"),
        (lambda: torch.use_deterministic_algorithms(True), "the deterministic algorithms"),
    ],
)
def test_what_a_plugin_changes_of_the_whole_process_is_put_back_and_is_its_error(monkeypatch, act, words) -> None:
    def drawn():
        torch.manual_seed(0)
        random.seed(0)
        model, numbers = nn.Sequential(nn.Dropout()), []
        for _ in range(12):
            numbers += [model(torch.ones(8, requires_grad=True)), torch.rand(2), torch.tensor(random.random())]
        return torch.cat([number.flatten() for number in numbers])

    monkeypatch.setattr(Upsetting, "act", staticmethod(act))
    monkeypatch.setattr(
        "hookd.target.plugins.global_state._is_alone", lambda: True
    )  # the test run has threads of its own
    alone = drawn()
    with running(Upsetting, Steady) as agent:
        beside = drawn()
        assert torch.equal(alone, beside)
        assert alone.dtype == beside.dtype
        assert beside.requires_grad
        assert agent.state("upsetting") == "quarantined"
        entry = agent.parts.registry.named("upsetting")
        assert f"it changed {words} of the training" in entry.last_error["text"]


def test_random_numbers_that_another_thread_may_have_drawn_are_not_put_back(monkeypatch) -> None:
    monkeypatch.setattr(Upsetting, "act", staticmethod(lambda: torch.rand(1)))
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        with running(Upsetting) as agent:
            torch.manual_seed(0)
            nn.Identity()(torch.ones(1))
            drawn = torch.rand(1)
            torch.manual_seed(0)
            assert torch.equal(drawn, torch.rand(2)[1:])
            assert agent.parts.registry.named("upsetting").errors == 0
    finally:
        done.set()
        thread.join()


class Once(Upsetting):
    name = "once"


def test_a_hook_that_changes_nothing_is_no_longer_watched_after_its_first_calls() -> None:
    with running(Once) as agent:
        model = nn.Identity()
        (listener,) = agent.parts.registry.named("once").listeners
        assert listener.run is not listener.call
        for _ in range(FIRST_CALLS):
            model(torch.ones(1))
        assert listener.run is listener.call


def test_a_hook_that_changed_something_at_the_last_of_its_first_calls_is_watched_again(monkeypatch) -> None:
    def act() -> None:
        calls.append(None)
        if len(calls) in (FIRST_CALLS, FIRST_CALLS + 2):
            torch.set_default_dtype(torch.float64)

    calls: list[None] = []
    monkeypatch.setattr(Once, "act", staticmethod(act))
    with running(Once) as agent:
        model = nn.Identity()
        for _ in range(FIRST_CALLS + 2):
            model(torch.ones(1))
            assert torch.get_default_dtype() == torch.float32
        assert agent.parts.registry.named("once").errors == 2
