"""A trace of some steps: every module call is a span in it, and a training that uses torch's profiler is left alone."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd import profiler

from hookd.errors import ControlError
from hookd.target.remote import profiler as ours
from hookd.target.remote import tracing
from hookd.tool.attach.control import Control
from hookd.tool.attach.trace import take
from tests.support.agent import running
from tests.support.processes import PATIENCE_S, wait_until

MIB = 1 << 20
ENDLESS = 1 << 40
"""A size that no trace reaches, whatever else grows in this process meanwhile."""
ORIGINALS = profiler._prepare_profiler, profiler._enable_profiler


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.add_module('odd"\\\nname', nn.Tanh())

    def forward(self, x):
        return self.second(getattr(self, 'odd"\\\nname')(self.first(x)))


class Training:
    """A model that the test's own thread trains, one step at a time, beside another that is only called."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(Block(), nn.ReLU())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.other = nn.Sequential(nn.Linear(8, 8))

    def step(self):
        self.optimizer.zero_grad()
        self.model(torch.ones(4, 8)).sum().backward()
        self.optimizer.step()

    def call_other(self):
        thread = threading.Thread(target=self.other, args=(torch.ones(4, 8),))
        thread.start()
        thread.join()

    def steps_until(self, condition):
        wait_until(lambda: self.step() or condition())


@pytest.fixture
def traced():
    """Return a function that takes traces of this process from another thread, as a tool does from another process."""
    with ThreadPoolExecutor(1) as pool:

        def begin(steps=2, timeout_s=PATIENCE_S, max_bytes=64 * MIB):
            into = io.BytesIO()
            future = pool.submit(take, os.getpid(), steps, into, timeout_s=timeout_s, max_bytes=max_bytes)
            return into, future

        yield begin


def spans(trace):
    """Return the complete events of the threads, by thread and in order, after checking that they nest."""
    by_thread = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and isinstance(event["tid"], int):
            by_thread.setdefault(event["tid"], []).append(event)
    for events in by_thread.values():
        events.sort(key=lambda event: (event["ts"], -event["dur"]))
        inside = []
        for event in events:
            while inside and inside[-1]["ts"] + inside[-1]["dur"] <= event["ts"] + 1e-3:
                inside.pop()
            event["inside"] = [outer["name"] for outer in inside]
            assert not inside or event["ts"] + event["dur"] <= inside[-1]["ts"] + inside[-1]["dur"] + 1e-3, event
            inside.append(event)
    return by_thread


def assert_nothing_is_left(agent):
    wait_until(lambda: agent.parts.tracing.state == "idle")
    assert (profiler._prepare_profiler, profiler._enable_profiler) == ORIGINALS
    assert not torch.autograd._profiler_enabled()
    assert not profiler._is_profiler_enabled
    assert not agent.parts.registry.has("trace")
    links = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{fd}")
    ]
    assert not [link for link in links if "hookd-trace" in link]
    assert not [*Path("/tmp").glob(f"hookd-trace-{os.getpid()}-*")]


def test_a_trace_shows_every_module_call_of_its_steps_in_its_thread_and_nested(traced, capfd):
    training = Training()
    with running("timing") as agent:
        training.step()
        training.call_other()
        into, future = traced(steps=2)
        training.steps_until(lambda: agent.parts.tracing.state == "tracing")
        first = agent.parts.count.absolute()
        training.step()
        training.call_other()
        training.steps_until(future.done)
        found = future.result()
        assert_nothing_is_left(agent)
    trace = json.loads(into.getvalue())
    assert (found.steps, found.first, found.bytes) == (2, first, len(into.getvalue()))
    assert trace["hookd"]["first_step"] == first
    own = [event for event in spans(trace)[threading.get_native_id()] if event["name"].startswith(("module", "phase"))]
    step = [
        ("phase forward", []),
        ("module (root)", ["phase forward"]),
        ("module 0", ["phase forward", "module (root)"]),
        ("module 0.first", ["phase forward", "module (root)", "module 0"]),
        ("module 0.odd???name", ["phase forward", "module (root)", "module 0"]),
        ("module 0.second", ["phase forward", "module (root)", "module 0"]),
        ("module 1", ["phase forward", "module (root)"]),
        ("phase backward", []),
        ("phase optimizer", ["Optimizer.step#SGD.step"]),
    ]
    assert [(event["name"], event["inside"]) for event in own] == step * 2
    addmm = [event for event in spans(trace)[threading.get_native_id()] if event["name"] == "aten::addmm"]
    assert {event["inside"][-2] for event in addmm} == {"module 0.first", "module 0.second"}
    if found.all_threads:
        others = [e["name"] for tid, es in spans(trace).items() if tid != threading.get_native_id() for e in es]
        assert [name for name in others if name.startswith("module")] == [
            "module #Sequential.(root)",
            "module #Sequential.0",
        ]
    written = capfd.readouterr()
    assert (written.out, written.err) == ("", "")


def test_a_training_that_profiles_itself_keeps_its_profiler(traced):
    training = Training()
    with running("timing") as agent:
        training.step()
        with torch.profiler.profile() as own:
            _, future = traced()
            with pytest.raises(ControlError, match="profiler runs in the target already"):
                future.result(60)
            training.step()
        assert any(event.name == "aten::addmm" for event in own.events())
        assert_nothing_is_left(agent)
        schedule = torch.profiler.schedule(wait=0, warmup=1, active=1)
        with torch.profiler.profile(schedule=schedule) as own:  # it warms up, which torch itself does not report
            _, future = traced()
            with pytest.raises(ControlError) as refused:
                future.result(60)
            own.step()
            training.step()
        assert any(event.name == "aten::addmm" for event in own.events())
        assert refused.value.reason == "profiler"
        assert_nothing_is_left(agent)


def test_a_profiler_that_the_training_begins_meanwhile_has_the_better_right(traced):
    training = Training()
    with running("timing") as agent:
        training.step()
        _, future = traced(steps=1000)
        training.steps_until(lambda: agent.parts.tracing.state == "tracing")
        with torch.profiler.profile() as own:
            training.step()
        assert any(event.name == "aten::addmm" for event in own.events())
        with pytest.raises(ControlError) as refused:
            future.result(60)
        assert refused.value.reason == "profiler"
        assert_nothing_is_left(agent)
        into, future = traced()
        training.steps_until(future.done)
        assert json.loads(into.getvalue())["traceEvents"]


def test_no_step_and_too_large_a_trace_are_reported_and_nothing_is_left(traced):
    training = Training()
    with running("timing") as agent:
        training.step()
        _, future = traced(timeout_s=0.2)
        with pytest.raises(
            ControlError, match=r"done 0 of 2 steps within 0.2 s \(MainThread is in phase other\)"
        ) as late:
            future.result(60)
        assert late.value.reason == "timeout"
        assert_nothing_is_left(agent)
        _, future = traced(max_bytes=10)
        training.steps_until(future.done)
        with pytest.raises(ControlError) as large:
            future.result()
        assert (large.value.reason, "--max-size" in large.value.hint) == ("too-large", True)
        assert_nothing_is_left(agent)


def test_a_tool_that_goes_and_a_detach_end_the_recording(traced):
    training = Training()
    with running("timing") as agent:
        training.step()
        with Control.connect(os.getpid()) as control:
            control.request("trace", steps=1000, max_bytes=ENDLESS)
            with pytest.raises(ControlError, match="being taken already"), Control.connect(os.getpid()) as second:
                second.request("trace", steps=1, max_bytes=ENDLESS)
            training.steps_until(lambda: agent.parts.tracing.state == "tracing")
        assert_nothing_is_left(agent)
        control = Control.connect(os.getpid())
        control.request("trace", steps=1000, max_bytes=ENDLESS)
        training.steps_until(lambda: agent.parts.tracing.state == "tracing")
        parts = agent.parts
    control.close()
    assert parts.tracing.state == "idle"
    assert not profiler._is_profiler_enabled
    assert parts.tracing.residue == parts.arming.residue == []
    training.step()


def test_a_trace_that_two_threads_abandon_at_once_is_removed_once(traced, monkeypatch):
    """By the control thread, whose tool has gone, and by a training thread that detaches."""
    with running("timing") as agent:
        ours_now = agent.parts.tracing
        _, future = traced()
        wait_until(lambda: ours_now.state == "waiting")
        removed, has_come = [], threading.Event()
        other = threading.Thread(target=ours_now.abandon)
        stop, release = ours_now._spans.stop, ours_now._profiler.release

        def stopped():
            if threading.current_thread() is other:
                has_come.set()
            stop()

        def released():
            removed.append(threading.current_thread())
            if len(removed) == 1:
                other.start()
                assert has_come.wait(PATIENCE_S)
            return release()

        monkeypatch.setattr(ours_now._spans, "stop", stopped)
        monkeypatch.setattr(ours_now._profiler, "release", released)
        ours_now.abandon()
        other.join(PATIENCE_S)
        assert removed == [threading.current_thread()]
        monkeypatch.undo()
        assert_nothing_is_left(agent)
    assert future.exception(PATIENCE_S) is not None


def test_a_child_forked_in_a_trace_records_nothing(tmp_path):
    training = Training()
    with running("timing") as agent:
        training.step()
        with Control.connect(os.getpid()) as control:
            control.request("trace", steps=1000, max_bytes=ENDLESS)
            training.steps_until(lambda: agent.parts.tracing.state == "tracing")
            training.step()
            child = os.fork()
            if not child:
                try:
                    torch.erfinv(torch.zeros(1))  # nobody else calls that
                    torch._C._autograd._disable_profiler().save(str(tmp_path / "child.json"))
                finally:
                    os._exit(0)
            os.waitpid(child, 0)
            recorded = (tmp_path / "child.json").read_text()
            assert "aten::addmm" in recorded
            assert "erfinv" not in recorded
        assert_nothing_is_left(agent)


class Preempted(Exception):  # noqa: N818 - a name as trainings have it
    """An exception that a training raises in its signal handler."""


@pytest.mark.parametrize("stage", ["_run_on_profiler_start", "_run_on_profiler_stop"])
def test_what_a_signal_handler_raises_while_a_recording_begins_or_ends_reaches_the_training(traced, monkeypatch, stage):
    def preempt(*_):
        raise Preempted

    def reported(name):
        tell(name)
        if name == stage:
            os.kill(os.getpid(), signal.SIGUSR1)

    tell, training = ours._notify_profilers, Training()
    before = signal.signal(signal.SIGUSR1, preempt)
    try:
        with running("timing") as agent:
            training.step()
            monkeypatch.setattr(ours, "_notify_profilers", reported)
            _, future = traced(steps=2)
            with pytest.raises(Preempted):
                training.steps_until(future.done)
            monkeypatch.setattr(ours, "_notify_profilers", tell)
            assert future.exception(10).reason == "profiler-failed"
            assert_nothing_is_left(agent)
            into, future = traced(steps=2)
            training.steps_until(future.done)
            assert json.loads(into.getvalue())["traceEvents"]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_span_that_outlives_its_recording_is_never_ended(monkeypatch):
    ended = []

    class Span:
        def __init__(self, text):
            self.text = text

        def __enter__(self):
            pass

        def __exit__(self, *_):
            ended.append(self.text)

    monkeypatch.setattr(tracing, "_Span", Span)
    spans = tracing.Spans()
    spans.is_on = True
    spans.phase("data")
    spans.phase("forward")
    spans.stop()
    spans.phase("other")
    assert ended == []
    spans.is_on = True
    spans.phase("data")
    spans.phase("other")
    assert ended == ["phase data"]


ENDING = """
import os, sys, threading, torch, hookd, warnings
from hookd.tool.attach.control import Control
warnings.filterwarnings("ignore", "This process")  # an expression under way holds no fork up for long
from hookd.target.boot import bootstrap
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
hookd.start(["timing"])

def step():
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()

step()
parts = bootstrap._agent.parts
with Control.connect(os.getpid()) as control:
    control.request("trace", steps=10000, max_bytes=1 << 31)
    control.request("eval", expression="any(torch.ones(400, 400).matmul(torch.zeros(400, 400)).sum() for _ in iter(int, 1))", limit_s=600)
    while parts.tracing.state != "tracing":
        step()
    child = os.fork()
    if not child:
        sys.exit(3)
    for _ in range(5):
        step()
    print(parts.tracing.state, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    sys.stdout.flush()
    class Last(torch.nn.Module):
        def forward(self, x):
            sys.exit(7)
    torch.nn.Sequential(Last())(torch.ones(1))
"""


def test_a_process_that_ends_in_a_trace_and_an_evaluation_ends_as_it_would_and_so_does_its_child():
    ended = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("tracing 3\n", "", 7)


def test_a_trace_whose_plugin_cannot_be_loaded_leaves_torchs_profiler_as_it_was(traced, monkeypatch):
    def fail(*_, **__):
        raise ControlError("not now", reason="busy")

    with running() as agent:
        monkeypatch.setattr(agent.parts.loading, "load", fail)
        _, future = traced()
        with pytest.raises(ControlError, match="not now"):
            future.result()
        assert (profiler._prepare_profiler, profiler._enable_profiler) == ORIGINALS
