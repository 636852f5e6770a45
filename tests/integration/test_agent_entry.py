"""The entry in C and the patch in Python: the same events, values and errors, call for call; and the entry's own hazards."""

from __future__ import annotations

import gc
import inspect
import signal
import sys
import threading
import traceback
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hookd import Plugin, hookimpl
from hookd.target.boot import bootstrap
from hookd.target.entry import dynamo, patch
from hookd.target.entry.c_entry import CannotEnterError, Entry
from hookd.target.tensors import statistics
from tests.support import emulated, sanitizers
from tests.support.agent import running
from tests.support.processes import wait_until
from tests.support.watched import is_entered, is_replaced, is_watched

X = torch.ones(2)
pytestmark = pytest.mark.usefixtures("entry")


class Events(Plugin):
    name = "events"

    def __init__(self) -> None:
        self.seen: list[tuple[object, ...]] = []

    @hookimpl
    def select(self, module):
        return not module.type.startswith("Quiet")

    @hookimpl
    def forward_pre(self, module, inputs, kwargs):
        self.seen.append(("pre", module.name, len(inputs), sorted(kwargs)))

    @hookimpl
    def forward(self, module, output):
        self.seen.append(("forward", module.name, type(output).__name__))

    @hookimpl
    def forward_error(self, module, error):
        self.seen.append(("error", module.name, type(error).__name__))


class Node(nn.Module):
    """Does what its plan says, then calls its children in the ways that a person may."""

    def __init__(self, act: str, ways: list[str], children: list[nn.Module]) -> None:
        super().__init__()
        self.act, self.ways, self.below = act, ways, nn.ModuleList(children)

    def forward(self, x, *more, times=1, depth=0, **named):
        for child, way in zip(self.below, self.ways, strict=True):
            x = WAYS[way](child, x)
        if self.act == "recurse" and depth < 2:
            x = self(x, depth=depth + 1)
        elif self.act in ERRORS:
            raise ERRORS[self.act](self.act)
        return {"tuple": (x, x), "none": None, "dict": {"x": x}}.get(self.act, x * times) if not depth else x


class Quiet(Node):
    """A node that no plugin selects."""


class Overriding(Node):
    """A node with a call of its own."""

    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs)


ERRORS = {"value": ValueError, "interrupt": KeyboardInterrupt, "exit": GeneratorExit}


def _caught(child, x):
    try:
        return _tensor(child(x), x)
    except BaseException:  # noqa: BLE001  whatever it is: it is the training's
        return x


def _tensor(output, x):
    return output if isinstance(output, torch.Tensor) else x


WAYS = {
    "plain": lambda child, x: _tensor(child(x), x),
    "named": lambda child, x: _tensor(child(x, times=2, other=None), x),
    "only named": lambda child, x: _tensor(child(x=x), x),
    "more": lambda child, x: _tensor(child(x, 1, *range(9)), x),
    "packed": lambda child, x: _tensor(type(child).__call__(*(child, x)), x),
    "mapped": lambda child, x: _tensor(*(*map(child, [x]), x)),
    "caught": _caught,
    "no grad": lambda child, x: torch.no_grad()(lambda: _tensor(child(x), x))(),
}
NODES = st.recursive(
    st.builds(lambda kind, act: (kind, act, [], []), st.sampled_from((Node, Quiet, Overriding)),
              st.sampled_from(("", "tuple", "none", "dict", "recurse", *ERRORS))),
    lambda inner: st.builds(
        lambda kind, act, below: (kind, act, [way for way, _ in below], [node for _, node in below]),
        st.sampled_from((Node, Quiet, Overriding)), st.sampled_from(("", "tuple", "recurse", "value")),
        st.lists(st.tuples(st.sampled_from(sorted(WAYS)), inner), max_size=3),
    ),
    max_leaves=12,
)  # fmt: skip


def made(node) -> nn.Module:
    kind, act, ways, below = node
    return kind(act, ways, [made(one) for one in below])


def outcome(model: nn.Module) -> object:
    """Call a model three times, as a training does; return what came of it."""
    found = []
    for _ in range(3):
        try:
            found.append(repr(model(X)))
        except BaseException as error:  # noqa: BLE001  see above
            found.append(f"{type(error).__name__}: {error}")
    return found


@pytest.mark.parametrize("examples", [15, pytest.param(200, marks=pytest.mark.load)])
def test_events_values_and_errors_are_those_of_the_patch_in_python(examples) -> None:
    settings(max_examples=examples, deadline=None)(given(node=NODES)(assert_alike))()


def assert_alike(node) -> None:
    plain = outcome(made(node))
    with running(Events) as agent:
        entered = outcome(made(node)), agent.plugin("events").seen
        assert is_entered()
    with pytest.MonkeyPatch.context() as switched:
        switched.setenv("HOOKD_ENTRY", "0")
        with running(Events) as agent:
            patched = outcome(made(node)), agent.plugin("events").seen
            assert is_replaced()
    assert entered == patched
    assert entered[0] == plain


def test_the_function_stays_what_it_is() -> None:
    call = nn.Module.__dict__["__call__"]
    before = vars(nn.Module).copy(), inspect.signature(call), call.__code__, call.__dict__.copy()
    with running(Events):
        nn.Linear(2, 2)(X)
        assert is_entered()
        assert not is_replaced()
        assert (vars(nn.Module).copy()["__call__"], inspect.signature(call), call.__code__, call.__dict__) == (
            call, *before[1:],
        )  # fmt: skip
    assert not is_watched()


def test_no_frame_of_ours_is_in_a_traceback_of_a_module_that_nobody_watches() -> None:
    model = Node("", ["plain"], [Quiet("value", [], [])])
    with running(Events):
        outcome(model)  # learn it
        with pytest.raises(ValueError, match="value") as caught:
            model(X)
        files = [frame.filename for frame in traceback.extract_tb(caught.tb)]
        assert sum("hookd plan" in name for name in files) == 1, "the root's"
        assert not [name for name in files if "hookd" in name.replace("hookd plan", "") and "tests" not in name]


class Light(nn.Module):
    def forward(self, x, **named):
        return x


class QuietLight(Light):
    """The same, which no plugin selects."""


class Looping(nn.Module):
    """Calls a module a thousand times, half of them with a keyword argument."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x, **named):
        for _ in range(500):
            self.inner(x)
            self.inner(x, **named)
        return x


@pytest.mark.parametrize("thousands", [100, pytest.param(1_000, marks=pytest.mark.load)])
def test_reference_counts_are_as_before_after_many_calls(thousands: int) -> None:
    for inner in (QuietLight(), Light()):  # called straight through, and by a plan
        model, named = Looping(inner), {"times": 1}
        objects = inner, model, X, named, type(inner).forward, type(inner), nn.Module._call_impl
        with running(Events) as agent:
            for rounds in (2, thousands if type(inner) is QuietLight else thousands // 20):
                gc.collect()
                before = [sys.getrefcount(one) for one in objects]
                for _ in range(rounds):
                    model(X, **named)
                    agent.plugin("events").seen.clear()
            gc.collect()
            assert [sys.getrefcount(one) for one in objects] == before


def test_a_module_may_die_inside_its_own_call() -> None:
    class Dying(nn.Module):
        def forward(self, x):
            holder.clear()
            return x + 1

    holder: list[nn.Module] = []
    with running(Events):
        for _ in range(10):
            holder.append(Dying())
            gone = weakref.ref(holder[0])
            assert holder[0](X).sum() == 4
            gc.collect()
            assert gone() is None


def test_addresses_that_are_used_again_have_no_old_plan() -> None:
    with running(Events) as agent:
        for number in range(2_000):
            model = nn.Sequential(Quiet("", [], []), nn.Identity()) if number % 2 else nn.Identity()
            before = len(agent.plugin("events").seen)
            model(X)
            assert len(agent.plugin("events").seen) - before == (4 if number % 2 else 2)
            del model


def test_a_plan_lives_as_long_as_it_is_in_the_table() -> None:
    """A signal handler may raise when it is in the table alone, and in no dict of Python's yet."""
    table, module = Entry.load(lambda module, args, kwargs: "missing"), nn.Identity()
    table.install()
    try:
        for _ in range(100):

            def plan(module, args, kwargs):
                return "planned"

            table.plans._put(id(module), id(plan))
            alive = weakref.ref(plan)
            del plan
            wishes = [[] for _ in range(1_000)]  # what would get its memory
            assert (module(X), alive() is None) == ("planned", False)
            del wishes
        table.plans.clear()
        assert alive() is None
        assert module(X) == "missing"
    finally:
        assert table.restore() == ""
        table.close()


def test_the_table_finds_each_of_many_modules_and_none_that_was_taken_out() -> None:
    table = Entry.load(lambda module, args, kwargs: "missing")
    modules = [nn.Identity() for _ in range(4_000)]

    def plan_of(number: int):
        return lambda module, args, kwargs: (number, module is modules[number], args, kwargs)

    table.install()
    try:
        for _ in range(3):  # what was taken out leaves holes
            for number, module in enumerate(modules):
                table.plans[id(module)] = plan_of(number)
            assert [module(X, a=1) for module in modules] == [(n, True, (X,), {"a": 1}) for n in range(len(modules))]
            for module in modules[::3]:
                assert table.plans.pop(id(module))
                assert table.plans.pop(id(module), "gone") == "gone"
            assert [module() for module in modules[::3]] == ["missing"] * len(modules[::3])
            assert [module()[0] for module in modules[1::3]] == [*range(1, len(modules), 3)]
            table.plans[id(modules[0])] = patch.SKIP
            assert modules[0](X) is X
        table.plans.clear()
        assert modules[1]() == "missing"
    finally:
        assert table.restore() == ""
        table.close()
    table.plans[5] = "late"  # by a thread that was about to
    assert table.plans.pop(5) == "late"


def test_threads_call_while_the_agent_comes_and_goes() -> None:
    model = Node("", ["plain", "named"], [Quiet("", [], []), Node("", [], [])])
    expected, wrong, ending = outcome(model), [], threading.Event()

    def call() -> None:
        while not ending.is_set():
            if outcome(model) != expected:
                wrong.append(threading.get_ident())

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(15):
            with running(Events) as agent:
                wait_until(lambda agent=agent: len(agent.plugin("events").seen) > 50, what="calls")
    finally:
        ending.set()
        for thread in threads:
            thread.join(60)
    assert not wrong
    assert not is_watched()


def test_a_detach_while_a_call_is_inside_leaves_the_code_until_the_process_ends() -> None:
    entered, ending = threading.Event(), threading.Event()

    class Waiting(nn.Module):
        def forward(self, x):
            entered.set()
            assert ending.wait(60)
            return x

    class Calling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Waiting()

    model, answers = Calling(), []
    waits = threading.Thread(target=lambda: answers.append(model.inner(X)))
    with running() as agent:  # nothing is selected below a root, and a root that is skipped has no frame of ours
        agent.parts.models.plans[id(model.inner)] = patch.SKIP
        waits.start()
        assert entered.wait(60)
        assert bootstrap.stop()["restored"] == "identity"
    assert not is_watched()
    with running(Events) as agent:
        nn.Identity()(X)
        assert len(agent.plugin("events").seen) == 2
        ending.set()
        waits.join(60)
    assert answers == [X]


def test_another_tool_in_the_same_place_is_found_and_python_takes_over() -> None:
    other = Entry.load(lambda module, args, kwargs: module._call_impl(*args, **kwargs))
    assert other is not None
    other.install()
    try:
        with pytest.raises(CannotEnterError, match="another tool has entered"):
            Entry.load(print)
        with running(Events) as agent:
            assert is_replaced()
            nn.Identity()(X)
            assert len(agent.plugin("events").seen) == 2
    finally:
        assert other.restore() == ""
        other.close()


@pytest.mark.parametrize("watch", ["setprofile", "settrace"])
def test_profilers_and_tracers_see_the_same_program(watch) -> None:
    model = Node("", ["plain"], [Quiet("", [], [])])

    def seen() -> list[str]:
        found = []

        def note(frame, event, _):
            if event in ("call", "return") and "hookd" not in frame.f_code.co_filename:
                found.append(f"{event} {frame.f_code.co_name}")
            return note

        getattr(sys, watch)(note)
        try:
            model.below[0](X)
        finally:
            getattr(sys, watch)(None)
        return [one for one in found if not one.endswith("_wrapped_call_impl")]

    plain = seen()
    with running() as agent:
        agent.parts.models.plans[id(model.below[0])] = patch.SKIP
        assert seen() == plain
    assert seen() == plain


@emulated.lacks("time")
@pytest.mark.parametrize(
    ("chosen", "passed"),
    [
        ("table or die or function or another", 5),
        pytest.param(
            "table or threads or addresses or die or function or traceback or another", 8, marks=pytest.mark.load
        ),
    ],
)
def test_the_sanitizers_see_no_access_that_they_would_not_allow(chosen, passed, tmp_path) -> None:
    try:
        done = sanitizers.tested(tmp_path, __file__, f"({chosen}) and not sanitizers")
    except OSError as error:
        pytest.skip(f"gcc has no sanitizers here: {error}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{passed} passed" in done.stdout


class Deep(nn.Module):
    """Calls itself a given number of times."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x, levels):
        return self(self.inner(x), levels - 1) if levels else x


def deepest(module: nn.Module) -> int:
    """Return how often a module can call itself."""
    least, most = 1, sys.getrecursionlimit()
    while least < most:
        middle = (least + most + 1) // 2
        try:
            module(X, middle)
            least = middle
        except RecursionError:
            most = middle - 1
    return least


OBSERVERS = ("nan", "timing", "activations", "optimizer", "coverage")


@pytest.fixture
def recursion_limit(request):
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(request.param)
    yield
    sys.setrecursionlimit(before)


low_limit, high_limit = (pytest.mark.parametrize("recursion_limit", [limit], indirect=True) for limit in (400, 20_000))


@low_limit
@pytest.mark.usefixtures("recursion_limit")
def test_a_recursion_to_the_limit_is_none_of_hookds():
    """Also in metered steps; near the limit calls are not observed, which is said once."""
    model = Deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    levels = deepest(model)
    with running(*OBSERVERS, options={"every": "1"}, budget=100.0) as agent:
        for _ in range(12):
            optimizer.zero_grad()
            model(X, levels).sum().backward()
            optimizer.step()
        agent.parts.models.tick(0.0)
        agent.parts.models.tick(1.0)
        logs = [line["message"] for line in agent.read().logs]
        assert agent.values("hookd_overhead_seconds")[("hookd",)] > 0, "no step was metered"
        assert not any(agent.values("hookd_plugin_errors").values()), logs
        assert sum("recursion limit" in line for line in logs) == 1
        assert deepest(model) >= levels


@low_limit
@pytest.mark.usefixtures("recursion_limit")
def test_calls_of_a_recursion_that_is_not_near_the_limit_are_all_counted():
    model = Deep()
    levels = deepest(model) // 2
    with running("timing", options={"every": "1"}, budget=100.0) as agent:
        model(X, levels)
        for _ in range(3):
            model(X, levels)
        calls = agent.values("hookd_timing_forward_calls")
        assert calls[("(root)",)] == 4 * (levels + 1)
        assert calls[("inner",)] == 4 * levels
        assert not any("recursion" in line["message"] for line in agent.read().logs)


@high_limit
@pytest.mark.usefixtures("recursion_limit")
@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="there a call of Python's takes so much of the stack that it ends before"
)
def test_of_the_stack_of_a_recursion_hookd_takes_little():
    """Where the limit was raised, the stack is the limit, and its end that of the process."""

    def stack_kb() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("VmStk")))

    model, levels = Deep(), 2500
    with torch.no_grad():
        try:
            model(X, levels)
        except RecursionError:
            pytest.skip("without hookd, too, this interpreter ends before: it limits the calls of C")
        plain = stack_kb()
        with running(*OBSERVERS, options={"every": "1"}, budget=100.0):
            for _ in range(4):
                model(X, levels)
    assert stack_kb() - plain < 500, "half a kilobyte a call would be 1,250"


def test_a_stop_inside_of_a_call_leaves_when_it_has_returned(either_way) -> None:
    class PluginStopper(nn.Module):
        def forward(self, x):
            return x if bootstrap.stop()["restored"] else None

    model, x = nn.Sequential(nn.Identity(), nn.Sequential(PluginStopper())), torch.ones(2)
    with running(Events):
        assert model(x) is x
        wait_until(lambda: bootstrap._agent is None, what="the agent's end")


class Pairs(Plugin):
    name = "pairs"

    def __init__(self) -> None:
        self.seen: list[str] = []

    @hookimpl
    def forward_pre(self, module):
        self.seen.append(f"pre {module.name}")

    @hookimpl
    def forward(self, module):
        self.seen.append(f"forward {module.name}")

    @hookimpl
    def forward_error(self, module):
        self.seen.append(f"error {module.name}")


class Acting(nn.Module):
    """Does something between the calls of its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.act = nn.ReLU(), lambda: None

    def forward(self, x):
        x = self.inner(x)
        self.act()
        return x


def test_a_call_is_delivered_to_its_end_where_plans_are_made_anew_meanwhile() -> None:
    acting = Acting()
    net = nn.Sequential(acting)
    with running(Pairs, budget=100.0) as agent:
        net(X)
        plugin = agent.plugin("pairs")
        expected, plugin.seen = plugin.seen, []
        acting.act = agent.parts.models.replan
        net(X)
        assert plugin.seen == expected

        def fail() -> None:
            agent.parts.models.replan()
            raise KeyError

        plugin.seen, acting.act = [], fail
        with pytest.raises(KeyError):
            net(X)
        assert plugin.seen[-2:] == ["error 0", "error (root)"]
        assert not agent.parts.local.thread.busy


def test_calls_are_delivered_while_plans_are_made_anew(monkeypatch) -> None:
    net = nn.Sequential(nn.ReLU(), nn.Sequential(nn.ReLU()))
    with running(Pairs, budget=100.0) as agent:
        net(X)
        plugin, models = agent.plugin("pairs"), agent.parts.models
        expected, plugin.seen, found = plugin.seen, [], []
        make = models._plan

        def slowly(key: int) -> object:
            plugin.seen = []
            net(X)
            found.append(plugin.seen)
            return make(key)

        monkeypatch.setattr(models, "_plan", slowly)
        models.replan()
        assert found == [expected] * 4


class Summaries(Plugin):
    name = "summaries"

    def __init__(self) -> None:
        self.seen: list[str] = []

    @hookimpl
    def output_summary(self, module, summary):
        self.seen.append(module.name)


def test_an_output_is_shown_once_where_c_may_not_look_at_it(monkeypatch) -> None:
    monkeypatch.setattr(statistics, "LOOKS_IN_C", False)
    net = nn.Sequential(nn.ReLU(), nn.Sequential(nn.ReLU()))
    with running(Summaries, budget=100.0) as agent:
        net(X)
        assert agent.plugin("summaries").seen == ["0", "1.0", "1", "(root)"]


def test_dynamo_has_its_callback_back_where_a_signal_handler_raises_in_a_hook() -> None:
    class Interrupted(Plugin):
        name = "interrupted"
        is_due = False

        @hookimpl
        def forward(self, module, output):
            if Interrupted.is_due:
                Interrupted.is_due = False
                signal.raise_signal(signal.SIGUSR1)

    def end(*_: object) -> None:
        raise InterruptedError

    switch, net = dynamo.no_frame(), nn.Sequential(nn.ReLU())
    old = signal.signal(signal.SIGUSR1, end)
    try:
        with running(Interrupted, budget=100.0):
            net(X)
            Interrupted.is_due = True
            before = switch(False)  # run what is compiled
            try:
                with pytest.raises(InterruptedError):
                    net(X)
            finally:
                found = switch(before)
    finally:
        signal.signal(signal.SIGUSR1, old)
    assert found is False
