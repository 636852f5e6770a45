"""Which modules are observed, under which names, and what happens to threads, forks and models that come and go."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel

from hookd import Plugin, hookimpl
from tests.support.agent import running
from tests.support.clock import Clock
from tests.support.processes import wait_until
from tests.support.watched import is_watched

X = torch.ones(2, 4)


class Names(Plugin):
    name = "names"

    def __init__(self) -> None:
        self.seen: list[str] = []

    @hookimpl
    def forward(self, module):
        self.seen.append(module.name)


class Only(Names):
    @hookimpl
    def select(self, module):
        return module.type == "ReLU"


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU()))


def test_a_module_that_nobody_wants_has_no_plan() -> None:
    from hookd.target.entry.patch import SKIP

    model = net()
    with running(Only) as agent:
        model(X)
        plans = agent.parts.models.plans
        assert plans[id(model[0])] is SKIP
        assert plans[id(model[1])] is SKIP
        assert plans[id(model[1][0])] is not SKIP
        assert agent.plugin("names").seen == ["1.0"]


def test_a_second_root_and_a_copy_are_told_apart() -> None:
    model = net()
    ema = copy.deepcopy(model)
    with running(Names) as agent:
        model(X)
        ema(X)
        seen = agent.plugin("names").seen
    assert seen == [
        "0",
        "1.0",
        "1",
        "(root)",
        "#Sequential.0",
        "#Sequential.1.0",
        "#Sequential.1",
        "#Sequential.(root)",
    ]


class Gradients(Names):
    @hookimpl
    def param_grad(self, module, name):
        self.seen.append(name)


@pytest.mark.parametrize("method", ["start", "attach"])
def test_what_was_called_before_its_model_has_its_names_in_it(method) -> None:
    """To warm up, or to find a shape: nothing is left of the names that it had by itself."""
    model = net()
    with running("timing", Gradients, method=method) as agent:
        for _ in range(10):
            model[0](X)
            model[1](X).sum()
        seen = agent.plugin("names").seen
        assert set(seen) == {"(root)", "#Sequential.0", "#Sequential.(root)"}
        for _ in range(10):
            model(X).sum().backward()
        seen.clear()
        model(X).sum().backward()
        assert sorted(seen) == ["(root)", "0", "0.bias", "0.weight", "1", "1.0"]
        calls = agent.values("hookd_timing_forward_calls")
        assert {values[0] for values in calls} == {"(root)", "0", "1", "1.0"}
        assert calls["(root)",] == 11
        assert [model.ordinal for model in agent.parts.models.names.models] == [1]


def test_a_shared_module_keeps_its_first_name() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    with running(Names) as agent:
        model(X)
        assert agent.plugin("names").seen == ["0", "1", "0", "(root)"]


def test_a_wrapper_and_what_it_wraps_are_one_module() -> None:
    model = net()
    wrapped = DataParallel(model)
    with running(Names) as agent:
        wrapped(X)
        assert agent.plugin("names").seen == ["0", "1.0", "1", "(root)"]
        agent.plugin("names").seen.clear()
        model(X)
        assert agent.plugin("names").seen == ["0", "1.0", "1", "(root)"]


def test_a_model_called_before_it_is_wrapped_is_the_same_model() -> None:
    model = net()
    with running(Names) as agent:
        model(X)
        agent.plugin("names").seen.clear()
        DataParallel(model)(X)
        assert agent.plugin("names").seen == ["0", "1.0", "1", "(root)"]


def test_a_replica_has_the_names_of_its_original() -> None:
    model = net()
    wrapped = DataParallel(model)
    with running(Names) as agent:
        wrapped(X)
        agent.plugin("names").seen.clear()
        replica = model._replicate_for_data_parallel()
        replica._is_replica = True
        replica(X)
        assert agent.plugin("names").seen[-1] == "(root)"
        assert len(agent.parts.models.names.models) == 1


def test_a_module_added_later_is_found() -> None:
    model = net()
    with running(Names) as agent:
        model(X)
        model.append(nn.Tanh())
        agent.parts.count.done += 1
        model(X)
        assert agent.plugin("names").seen[-2:] == ["2", "(root)"]


def test_modules_made_inside_forward_do_not_pile_up() -> None:
    class Making(nn.Module):
        def forward(self, x):
            return nn.ReLU()(x)

    model = Making()
    with running(Names) as agent:
        for _ in range(5):
            model(X)
        gc.collect()
        assert agent.plugin("names").seen == ["#Making.(root)"] * 5
        assert agent.parts.models._ignored == {}
        assert set(agent.parts.models.plans) == {id(model)}


def test_the_heartbeat_of_a_thread_that_ended_is_given_back() -> None:
    model = net()
    with running(Names) as agent:
        for _ in range(3):
            thread = threading.Thread(target=model, args=(X,))
            thread.start()
            thread.join(60)
        # join() returns a moment before the kernel has forgotten the thread.
        wait_until(
            lambda: agent.parts.ticks.tick(0.0) or len(agent.read().heartbeats) <= 2,
            what="no heartbeats but this thread's and hookd's own",
        )


def test_after_an_attach_a_deep_model_is_learnt_in_portions_parents_first() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(40)])
    names = [name or "(root)" for name, _ in model.named_modules()]
    with running(Names, method="attach", clock=Clock()) as agent:
        seen, counts = agent.plugin("names").seen, []
        while not counts or counts[-1] < len(names):
            seen.clear()
            model(X)
            assert set(seen) == set(names[: len(seen)]), "parents first, in the model's order"
            counts.append(len(seen))
            assert len(counts) < 50
        assert counts[0] == 1 + 8
        assert all(a < b for a, b in itertools.pairwise(counts)), "each call learns more"
        assert agent.values("hookd_modules")[("observed",)] == len(names)
    with running(Names) as agent:
        model(X)
        assert len(agent.plugin("names").seen) == len(names), "from the first step where nobody trains yet"


def test_what_changes_the_training_is_armed_everywhere_at_once() -> None:
    class Doubles(Plugin):
        name = "doubles"
        mutates = True

        @hookimpl
        def forward(self, output):
            return output * 2

    model = nn.Sequential(*[nn.Identity() for _ in range(40)])
    with running(Names, Doubles, method="attach"):
        assert model(X)[0, 0] == 2.0**41
    with running(Names, method="attach") as agent:
        model(X)
        assert agent.parts.models.learning
        agent.parts.loading.load(Doubles(), {}, by_name=True)
        assert model(X)[0, 0] == 2.0**41


def test_a_model_that_is_dropped_while_it_is_learnt_is_forgotten() -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(40)])
    ref = weakref.ref(model)
    with running(Names, method="attach", clock=Clock()) as agent:
        model(X)
        models = agent.parts.models
        assert len(models.learning) == 1
        del model
        gc.collect()
        assert ref() is None
        assert not models.names.known
        net()(X)
        assert not models.learning, "there is nothing left to learn of it"
        assert agent.plugin("names").seen[-1] == "(root)", "as the other one is gone"


def test_a_root_made_anew_for_every_step_is_one_series() -> None:
    with running("timing") as agent:
        net()(X)
        for _ in range(10):
            nn.CrossEntropyLoss()(X, X.softmax(1))
            gc.collect()
        modules = {values[0] for values in agent.values("hookd_timing_forward_calls")}
        assert modules == {"(root)", "0", "1", "1.0"} | ({"#CrossEntropyLoss.(root)"} & modules)
        assert len(agent.parts.models.names.models) <= 2


@pytest.mark.parametrize("is_called_alone_first", [True, False])
def test_a_container_made_anew_around_models_that_live_on_is_one_series(is_called_alone_first: bool) -> None:
    generator, discriminator = net(), nn.Sequential(nn.Linear(4, 4))
    with running("timing") as agent:
        if is_called_alone_first:
            discriminator(generator(X))
        for _ in range(10):
            nn.Sequential(generator, discriminator)(X)
            discriminator(X)
        calls = agent.values("hookd_timing_forward_calls")
        assert {values[0] for values in calls} == {"(root)", "0", "0.0", "0.1", "0.1.0", "1", "1.0"}
        assert calls["(root)",] == 10
        assert calls["1",] == calls["1.0",] == 20
        other = nn.Sequential(net(), nn.Sequential(nn.Linear(4, 4)))
        other(X)
        assert ("#Sequential.(root)",) in agent.values("hookd_timing_forward_calls"), (
            "one of the same shape is another model"
        )


def test_observing_keeps_no_model_alive_and_stores_nothing_on_it() -> None:
    model = net()
    before = {name: sorted(vars(module)) for name, module in model.named_modules()}
    ref = weakref.ref(model)
    with running("timing", "nan", "activations") as agent:
        model(X).sum().backward()
        assert {name: sorted(vars(module)) for name, module in model.named_modules()} == before
        copy.deepcopy(model)
        del model
        gc.collect()
        assert ref() is None
        assert agent.parts.models.plans == {}


def test_a_module_that_compares_by_value_is_observed() -> None:
    class Equal(nn.Module):
        __hash__ = None

        def __eq__(self, other):
            raise AssertionError("compared")

        def __bool__(self):
            raise AssertionError("truth-tested")

        def __len__(self):
            raise AssertionError("measured")

        def forward(self, x):
            return x

    with running(Names) as agent:
        nn.Sequential(Equal())(X)
        assert agent.plugin("names").seen == ["0", "(root)"]


def test_threads_have_stacks_of_their_own() -> None:
    class Stacks(Plugin):
        name = "stacks"

        def __init__(self) -> None:
            self.seen: set = set()

        @hookimpl
        def configure(self, context):
            self.context = context

        @hookimpl
        def forward_pre(self, module):
            self.seen.add(tuple(m.name for m in self.context.stack()))

    models = [net() for _ in range(4)]
    with running(Stacks) as agent:
        for model in models:
            model(X)

        def work(model: nn.Module) -> None:
            for _ in range(50):
                model(X)

        threads = [threading.Thread(target=work, args=(m,)) for m in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        seen = agent.plugin("stacks").seen
        assert agent.state("stacks") == "active"
    assert {len(stack) for stack in seen} == {1, 2, 3}
    assert all(len({name.split(".")[0] for name in stack if name.startswith("#")}) <= 1 for stack in seen)


def test_a_call_in_flight_at_the_attach_is_passed_through() -> None:
    order: list[str] = []

    class Attaching(nn.Module):
        def forward(self, x):
            order.append("in")
            return x

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Attaching()

        def forward(self, x):
            with running(Names) as agent:
                self.inner(x)
                assert agent.plugin("names").seen == []
                threading.Thread(target=lambda: None).start()
            return self.inner(x)

    Outer()(X)
    assert order == ["in", "in"]


def test_a_forked_child_is_silent_and_unpatched() -> None:
    model = net()
    with running(Names, "timing") as agent:
        model(X)
        assert is_watched()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                seen = list(agent.plugin("names").seen)
                model(X)
                is_silent = agent.plugin("names").seen == seen
                is_restored = not is_watched()
                is_closed = "hookd-page" not in Path("/proc/self/maps").read_text()
                alone = threading.active_count() == 1
                code = 0 if is_silent and is_restored and is_closed and alone else 2
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        model(X)
        assert len(agent.plugin("names").seen) == 8
    assert not is_watched()


def test_a_child_forked_inside_a_forward_finishes_that_forward() -> None:
    class Forking(nn.Module):
        child = -1

        def forward(self, x):
            self.child = os.fork()
            return x + 1

    model = nn.Sequential(Forking(), nn.Identity())
    with running(Names, "timing") as agent:
        before = agent.read().heartbeats
        code = 1
        try:
            out = model(X)
            code = 0 if torch.equal(out, X + 1) else 2
        finally:
            if model[0].child == 0:
                os._exit(code)
        _, status = os.waitpid(model[0].child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert agent.read().heartbeats[0].events == before[0].events + 1
