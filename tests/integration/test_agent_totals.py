"""Totals that plugins add up at each call: in C if the entry counts the calls, and the same in Python by the patch."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from torch import nn

import hookd
from hookd import Plugin, hookimpl
from hookd.target.boot import bootstrap
from hookd.target.entry.c_entry import GROUPS
from hookd.wire.page import CALL_RECORD, PHASE_RECORD, PHASES
from tests.integration.test_agent_entry import NODES, Light, Looping, Node, X, made, outcome
from tests.support import emulated, sanitizers
from tests.support.agent import running


class Silent(Plugin):
    """Adds up all calls, and listens in sampled steps alone."""

    name = "adds"
    remembers = True
    sampled = ("forward",)

    def __init__(self) -> None:
        self.seen: list[object] = []
        self.calls: list[str] = []

    @hookimpl
    def configure(self, context):
        self.context = context
        of_module = ["module"]
        context.add_up(
            calls=context.counter("calls", "Calls.", of_module),
            seconds=context.counter("seconds", "Of calls.", of_module),
            self_seconds=context.counter("self_seconds", "Of calls, without those inside.", of_module),
        )
        context.add_up(calls=context.counter("calls_again", "The same, once more.", of_module))

    @hookimpl
    def select(self, module):
        return not module.type.startswith("Quiet")

    @hookimpl
    def forward(self, module):
        self.calls.append(module.name)


class Adds(Silent):
    """Listens also to calls that have failed, and to the returns of models."""

    @hookimpl
    def forward_error(self, module, error):
        self.seen.append((module.name, type(error).__name__, [one.name for one in self.context.stack()]))

    @hookimpl
    def root_forward(self):
        self.seen.append([
            (one.module.name, one.version, len(one.inputs), one.ref() is not None) for one in self.context.returned()
        ])  # fmt: skip


class Adds2(Adds):
    name = "adds2"


def counted_in_c(agent, act) -> bool:
    """Return whether the entry counts the calls of `act`."""
    models = agent.parts.models
    agent.parts.steps._manual_updates = None  # otherwise the call would be a turn of its own, which is metered or not
    models.counting.meter(is_metered=True)
    models.counting.metered_ns()
    act()
    models.counting.meter(is_metered=False)
    return models.counting.metered_ns()[0] > 0


def learn(agent, model) -> None:
    """Call a model once; from then on its modules have plans and small outputs."""
    outcome(model)
    for _, _, module in agent.parts.models.names.known.values():
        module._waits = 1
    agent.plugin("adds").seen.clear()


def seen_of(node):
    """Run a model; return the outcome, the plugin's records, and how often each module was called."""
    with running(Adds, budget=0) as agent:
        model = made(node)
        learn(agent, model)
        found = outcome(model)
        return found, agent.plugin("adds").seen, {k: n for k, n in agent.values("hookd_adds_calls").items() if n}


@pytest.mark.usefixtures("entry")
@pytest.mark.parametrize("examples", [10, pytest.param(100, marks=pytest.mark.load)])
def test_calls_values_errors_and_what_is_remembered_are_those_of_the_patch_in_python(examples) -> None:
    settings(max_examples=examples, deadline=None)(given(node=NODES)(assert_alike))()


def assert_alike(node) -> None:
    entered = seen_of(node)
    with pytest.MonkeyPatch.context() as switched:
        switched.setenv("HOOKD_ENTRY", "0")
        assert seen_of(node) == entered


@pytest.mark.usefixtures("entry")
def test_calls_of_a_metered_step_are_recorded_in_c_as_in_python():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.ReLU())
    with running(Adds, budget=0) as agent:
        learn(agent, model)
        first = 1 + max((one.seq for one in agent.records()), default=0)
        assert counted_in_c(agent, lambda: model(X))
        agent.parts.page.record(CALL_RECORD, 7, 8)
        seen = [one for one in agent.records() if one.seq >= first]
        ids = [agent.parts.models.names.known[id(one)][2].id for one in (model, model[0], model[0][0], model[1])]
        step = seen[0].step  # the plan of the outermost call has recorded that one
        assert [(one.seq, one.kind, one.module, one.step, one.value) for one in seen] == [
            (first, CALL_RECORD, ids[0], step, 0.0),
            (first + 1, PHASE_RECORD, 0, agent.parts.count.absolute(), PHASES.index("forward")),
            *((first + 2 + at, CALL_RECORD, number, step, 0.0) for at, number in enumerate(ids[1:])),
            (first + 5, CALL_RECORD, 7, 8, 0.0),
        ]
        whens = [one.when for one in seen]  # unix seconds, of Python's and of C's
        assert whens == pytest.approx([whens[0]] * len(whens), abs=60)


class Again(nn.Module):
    """Calls itself and, at the bottom, its child."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Linear(2, 2)

    def forward(self, x, levels):
        return self(x, levels - 1) if levels else self.bottom(x)


def test_the_time_of_a_module_that_calls_itself_is_that_of_its_outermost_calls(either_way) -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.again = Again()

        def forward(self, x):
            return self.again(x, 30)

    model = Around()
    with running(Adds, budget=0) as agent:
        for _ in range(50):
            model(X)
        calls, seconds, own = (agent.values(f"hookd_adds_{name}") for name in ("calls", "seconds", "self_seconds"))
        assert (calls["again",], calls["again.bottom",], calls["(root)",]) == (50 * 31, 50, 50)
        assert seconds["again.bottom",] < seconds["again",] < seconds["(root)",], "and not thirty times as much"
        assert own["again",] == pytest.approx(seconds["again",] - seconds["again.bottom",], rel=1e-6)


class Backwards(Plugin):
    """Records each backward event."""

    name = "backwards"

    @hookimpl
    def configure(self, context: hookd.Context) -> None:
        self.seen: list[str] = []

    @hookimpl
    def backward(self, module: hookd.Module) -> None:
        self.seen.append(module.name)


def test_of_a_module_that_calls_itself_the_backward_of_the_outermost_call_is_reported(either_way) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Again(), nn.Linear(2, 2))
    model[1].forward = lambda x, levels=5: model[1](model[1].bottom(x), levels - 1) if levels else x
    with running(Backwards) as agent:
        for _ in range(2):
            model(X).sum().backward()
        assert Counter(agent.plugin("backwards").seen) == {"(root)": 2, "0": 2, "1": 2, "1.bottom": 10, "2": 2}


def test_calls_of_a_model_by_itself_are_counted_and_those_that_a_wrapper_passes_on_are_not(either_way) -> None:
    model = Again()
    wrapped = nn.DataParallel(model)  # without a GPU it passes the call on
    with running(Adds, budget=0) as agent:
        for _ in range(50):
            model(X, 30)
        calls, seconds, own = (agent.values(f"hookd_adds_{name}") for name in ("calls", "seconds", "self_seconds"))
        assert (calls["(root)",], calls["bottom",]) == (50 * 31, 50)
        assert own["(root)",] == pytest.approx(seconds["(root)",] - seconds["bottom",], rel=1e-6)
        for _ in range(50):
            wrapped(X, 30)
        calls = agent.values("hookd_adds_calls")
        assert (calls["(root)",], calls["bottom",]) == (100 * 31, 100)


def test_own_times_add_up_to_that_of_the_model_and_each_counter_has_all_calls(either_way) -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(3)])
    with running(Adds, budget=0) as agent:
        model(X)
        assert counted_in_c(agent, lambda: model(X)) is (either_way == "entry")
        for _ in range(48):
            model(X)
        calls, seconds, own = (agent.values(f"hookd_adds_{name}") for name in ("calls", "seconds", "self_seconds"))
        assert set(calls.values()) == {50}
        assert agent.values("hookd_adds_calls_again") == calls
        assert sum(own.values()) == pytest.approx(seconds["(root)",], rel=1e-6)
        assert all(0 < own[module] <= seconds[module] for module in own)


def test_a_function_that_listens_is_called_in_its_steps_and_no_call_is_missed(either_way) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with running(Adds, options={"every": "4"}) as agent:
        for _ in range(16):
            model(X).sum().backward()
            optimizer.step()
        assert agent.plugin("adds").calls == ["0", "1", "(root)"] * 4
        assert set(agent.values("hookd_adds_calls").values()) == {16}


def test_a_plugin_that_comes_or_goes_while_a_call_is_inside_is_no_harm(either_way) -> None:
    acts = []

    class Changing(nn.Module):
        def forward(self, x):
            while acts:
                acts.pop()()
            return x

    model = nn.Sequential(Changing())
    with running(Adds, Adds2, budget=0) as agent:
        model(X)
        acts.append(lambda: agent.parts.loading.unload("adds2"))
        assert model(X) is X
        assert model(X) is X
        assert agent.values("hookd_adds2_calls") == {}
        calls = agent.values("hookd_adds_calls")["0",]
        assert calls in (2, 3), "the call in whose middle everything changed may be missed"
        acts.append(lambda: agent.parts.stopper.switch_off(agent.parts.registry.named("adds"), "disabled"))
        assert model(X) is X
        assert model(X) is X
        assert agent.values("hookd_adds_calls")["0",] <= calls + 1


def test_a_detach_while_a_call_is_inside_leaves_the_call_alone(either_way) -> None:
    inside, ending, answers = threading.Event(), threading.Event(), []

    class Waiting(nn.Module):
        waits = False

        def forward(self, x):
            if self.waits:
                inside.set()
                assert ending.wait(60)
                raise ValueError("of the training")
            return x

    model = nn.Sequential(nn.Sequential(Waiting()))

    def call() -> None:
        try:
            model[0](X)
        except ValueError as error:
            answers.append(str(error))

    with running(Adds, budget=0) as agent:
        model(X)
        model[0][0].waits = True
        thread_state = agent.parts.local

        def from_inside() -> None:  # as if called by an observed module, with no frame of ours for that module's call
            module = next(one for _, _, one in agent.parts.models.names.known.values() if one.name == "(root)")
            thread_state.thread.top = (module, None, 0.0)
            call()
            assert either_way != "entry" or thread_state.thread.top[1] is None

        waits = threading.Thread(target=from_inside)
        waits.start()
        assert inside.wait(60)
        if either_way == "entry":
            assert bootstrap.stop()["restored"] == "identity"
        ending.set()
        waits.join(60)
    assert answers == ["of the training"]


def test_a_plugin_without_any_hook_at_a_call_has_its_calls_added_up_as_well(either_way) -> None:
    class Bare(Plugin):
        name = "bare"

        @hookimpl
        def configure(self, context):
            context.add_up(calls=context.counter("calls", "Calls.", ["module"]))

    model = nn.Sequential(nn.Identity())
    with running(Bare) as agent:
        for _ in range(3):
            model(X)
        assert agent.values("hookd_bare_calls") == {("(root)",): 3, ("0",): 3}


@pytest.mark.usefixtures("entry")
def test_calls_are_counted_in_c_however_often_plugins_come_and_go() -> None:
    model = nn.Sequential(nn.Identity())
    with running(Silent, Adds2, budget=0) as agent:
        model(X)
        for _ in range(GROUPS + 1):
            agent.parts.loading.unload("adds2")
            agent.parts.loading.load(Adds2(), {}, by_name=True)
        assert counted_in_c(agent, lambda: model(X))


@emulated.lacks("time")  # the plugin is quarantined, because it takes 2 s of a step
def test_threads_are_each_counted(either_way) -> None:
    model = nn.Sequential(nn.Sequential(nn.Identity()))
    with running(Adds, budget=0) as agent:
        model(X)
        before = agent.values("hookd_adds_calls")["0.0",]
        threads = [threading.Thread(target=lambda: [model(X) for _ in range(500)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert agent.values("hookd_adds_calls")["0.0",] == before + 2_000
        assert not agent.parts.local.thread.stack()


def test_a_child_that_is_forked_inside_of_a_call_goes_on(either_way) -> None:
    class Forking(nn.Module):
        forks = False

        def forward(self, x):
            return x + (os.fork() if self.forks else 1)

    model = nn.Sequential(nn.Sequential(Forking()))
    with running(Adds, budget=0) as agent:
        model(X)
        model[0][0].forks = True
        output = model(X)
        if output.sum() == 2:  # 1 + 0, twice: the child
            os._exit(0 if not bootstrap._agent and model[0][0].requires_grad_() else 1)
        child = int(output[0]) - 1
        assert os.waitpid(child, 0)[1] == 0
        assert agent.values("hookd_adds_calls")["0.0",] == 2


def test_a_plugin_that_is_quarantined_adds_nothing_more(either_way) -> None:
    model = nn.Sequential(nn.Identity())
    with running(Adds, budget=0) as agent:
        model(X)
        agent.parts.stopper.quarantine(agent.parts.registry.named("adds"), "for the test")
        model(X)
        assert agent.values("hookd_adds_calls")["0",] == 1


def test_a_plugin_that_raises_when_it_is_notified_of_an_error_leaves_that_error_alone(either_way) -> None:
    class Raising(Adds):
        name = "raising"

        @hookimpl
        def forward_error(self, module, error):
            raise OSError("of the plugin")

    model = Node("", ["plain"], [Node("value", [], [])])
    with running(Raising, budget=0) as agent:
        for _ in range(3):
            with pytest.raises(ValueError, match="value") as caught:
                model(X)
        assert caught.value.__context__ is None
        assert not agent.parts.local.thread.stack()
        assert agent.parts.registry.named("raising").errors


def test_what_a_call_returned_can_be_read_while_the_model_runs(either_way) -> None:
    class Reading(nn.Module):
        def forward(self, x):
            if plugin:
                found.append([(one.module.name, one.tensor()) for one in plugin[0].context.returned()])
            return x

    plugin, found = [], []
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), Reading())
    with running(Adds, budget=0) as agent:
        learn(agent, model)
        plugin.append(agent.plugin("adds"))
        counted_in_c(agent, lambda: model(X))
    ((first, output), (second, _)) = found[0][:2]
    assert (first, second) == ("0", "1")
    assert torch.equal(output, model[0](X))


@pytest.mark.usefixtures("entry")
@pytest.mark.parametrize("many", [100, pytest.param(1_000, marks=pytest.mark.load)])
def test_reference_counts_are_as_before_after_many_calls_that_are_counted(many) -> None:
    class Inner(Light):
        pass

    model, named = Looping(Inner()), {"times": 1}
    objects = model.inner, model, X, named, Inner.forward, Inner, nn.Module._call_impl
    with running(Silent, budget=0) as agent:
        learn(agent, model := nn.Sequential(model))
        inner = next(one for _, _, one in agent.parts.models.names.known.values() if one.name == "0.inner")
        state = agent.parts.local.thread
        for rounds in (2, many):
            gc.collect()
            before = [sys.getrefcount(one) for one in (*objects, inner, state)]
            for _ in range(rounds):
                model[0](X, **named)
                model(X)
        gc.collect()
        assert [sys.getrefcount(one) for one in (*objects, inner, state)] == before
        assert agent.values("hookd_adds_calls")["0.inner",] == 7_000 + 2_000 * many


@pytest.mark.load
def test_the_sanitizers_see_no_access_that_they_would_not_allow(tmp_path) -> None:
    try:
        done = sanitizers.tested(tmp_path, __file__, "not sanitizers and not million and not patch")
    except OSError as error:
        pytest.skip(f"gcc has no sanitizers here: {error}")
    assert done.returncode == 0, done.stdout + done.stderr


class Back(Plugin):
    """Adds up backward passes, in sampled steps."""

    name = "back"
    sampled = ("backward",)

    @hookimpl
    def configure(self, context):
        self.context = context
        of_module = ["module"]
        for which in ("", "_again"):
            context.add_up(
                backward=True,
                calls=context.counter(f"calls{which}", "Backward passes.", of_module),
                seconds=context.counter(f"seconds{which}", "Of those.", of_module),
                self_seconds=context.counter(f"self_seconds{which}", "Of those, without modules inside.", of_module),
            )


class Listening(Back):
    """Listens to the gradients as well."""

    name = "back"

    @hookimpl
    def backward(self, module, grad_input, elapsed_ns):
        self.reported = [*getattr(self, "reported", ()), (module.name, elapsed_ns > 0, len(grad_input))]


def trained(model, steps, shape=(4, 2)):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(torch.randn(*shape)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", [Back, Listening])
def test_backward_passes_are_added_up_for_the_steps_that_they_stand_for(either_way, kind) -> None:
    size = 384  # some milliseconds, so that an interruption of the thread between two modules does not matter
    model = nn.Sequential(nn.Sequential(nn.Linear(size, size), nn.Tanh()), nn.Linear(size, size))
    with running(kind, options={"every": "4"}) as agent:
        trained(model, 16, (size, size))
        calls, seconds, own = (agent.values(f"hookd_back_{name}") for name in ("calls", "seconds", "self_seconds"))
        assert calls == dict.fromkeys([("(root)",), ("0",), ("0.0",), ("0.1",), ("1",)], 16)
        assert agent.values("hookd_back_calls_again") == calls
        assert agent.values("hookd_back_seconds_again") == seconds
        assert all(0 < own[one] <= seconds[one] for one in own)
        assert sum(own.values()) == pytest.approx(seconds["(root)",], rel=0.01)
        if kind is Listening:
            assert Counter(name for name, *_ in agent.plugin("back").reported) == dict.fromkeys(
                ("1", "0.1", "0.0", "0", "(root)"), 4
            )


@pytest.mark.usefixtures("entry")
def test_a_backward_without_a_listener_calls_no_python_function_for_a_module_inside() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    with running(Back, options={"every": "1"}) as agent:
        trained(model, 2)
        reported = []
        agent.parts.dispatch.flowed = lambda *given: reported.append(given)
        trained(model, 8)
        assert set(agent.values("hookd_back_calls").values()) == {10}
        assert reported == []


def test_of_a_plugin_that_has_gone_since_the_call_no_backward_is_added(either_way) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with running(Silent, Back, options={"every": "1"}) as agent:
        trained(model, 2)
        loss = model(torch.randn(4, 2)).sum()
        agent.parts.loading.unload("back")
        agent.parts.loading.load(Back(), {"every": "1"}, by_name=True)  # its series take the places of the old ones
        before = agent.values("hookd_back_calls")
        loss.backward()
        after = agent.values("hookd_back_calls")
        assert [after[one] - before[one] for one in before] == [0] * len(before)
        trained(model, 3)
        assert set(agent.values("hookd_back_calls").values()) == {3}


class Back2(Back):
    name = "back2"


def test_each_of_two_plugins_has_its_own_steps_added(either_way) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Linear(2, 2))
    with running(Back, options={"every": "1"}) as agent:
        agent.parts.loading.load(Back2(), {"every": "4"}, by_name=True)
        trained(model, 16)
        agent.parts.stopper.switch_off(agent.parts.registry.named("back2"), "disabled")
        trained(model, 4)
        assert set(agent.values("hookd_back_calls").values()) == {20}
        assert set(agent.values("hookd_back2_calls").values()) == {16}


def test_of_a_plugin_that_was_quarantined_since_the_call_no_backward_is_added(either_way) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with running(Back, options={"every": "1"}) as agent:
        trained(model, 2)
        loss = model(torch.randn(4, 2)).sum()
        agent.parts.stopper.quarantine(agent.parts.registry.named("back"), "for the test")
        loss.backward()
        assert set(agent.values("hookd_back_calls").values()) == {2}


def test_a_plugin_may_have_no_backward_added_for_a_while(either_way) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with running(Back, options={"every": "1"}) as agent:
        trained(model, 2)
        listen = agent.plugin("back").context.listen
        listen("backward_totals", wanted=False)
        trained(model, 2)
        assert set(agent.values("hookd_back_calls").values()) == {2}
        listen("backward_totals", wanted=True)
        trained(model, 2)
        assert set(agent.values("hookd_back_calls").values()) == {4}


class Choosing(Listening):
    """Listens to the gradients of one module alone."""

    @hookimpl
    def select(self, module):
        return {"backward"} if module.name == "0" else {"backward_totals"}


def test_a_plugin_may_have_backward_passes_added_up_where_its_hook_is_not_called(either_way) -> None:
    with running(Choosing, options={"every": "1"}) as agent:
        trained(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)), 3)
        assert [name for name, *_ in agent.plugin("back").reported] == ["0"] * 3
        assert agent.values("hookd_back_calls") == dict.fromkeys([("(root)",), ("0",), ("1",), ("2",)], 3)
