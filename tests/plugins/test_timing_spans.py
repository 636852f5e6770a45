"""The spans of a device that are timed, tested without one: the test simulates its events and its clock."""

from __future__ import annotations

from collections import Counter, deque
from types import SimpleNamespace

import hookd_timing.device
import pytest
import torch
from torch import nn

from hookd import Plugin, hookimpl


class FakeCUDA:
    """A device whose clock advances only with work; all tensors are on it once it is in use.

    Attributes:
        is_in_use: whether the program has initialized it.
        seconds: the device's clock.
        records: how many events were recorded.
    """

    def __init__(self, monkeypatch) -> None:
        self.is_in_use = True
        self.seconds = 0.0
        self.records = 0
        self._device = torch.device("cuda", 0)
        made = SimpleNamespace(
            is_in_use=lambda: self.is_in_use, stream=lambda _device: self, event=lambda *, is_timed: Event(self)
        )
        monkeypatch.setattr(hookd_timing.device, "device_of", lambda *_: self._device)
        monkeypatch.setattr(hookd_timing.device, "accelerator_of", lambda _: made)
        for place in ("hookd_timing", "hookd_timing.device"):
            monkeypatch.setattr(f"{place}.accelerators", lambda: [made])

    @property
    def device(self):
        return self._device

    def work(self, seconds: float) -> None:
        self.seconds += seconds


class Event:
    """Recording one takes the device, or makes it wait, for a while."""

    COST_S = 0.25

    def __init__(self, cuda: FakeCUDA) -> None:
        self.cuda, self.at = cuda, 0.0

    def record(self, stream) -> None:
        assert stream is self.cuda
        self.at = self.cuda.seconds
        self.cuda.seconds += self.COST_S
        self.cuda.records += 1

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at - self.COST_S) * 1e3  # what the first one cost is of this double's making


@pytest.fixture
def cuda(monkeypatch) -> FakeCUDA:
    made = FakeCUDA(monkeypatch)
    monkeypatch.setattr(Work, "cuda", made, raising=False)
    monkeypatch.setattr(Greedy, "cuda", made, raising=False)
    return made


class Work(nn.Module):
    """Takes a second of the device."""

    cuda: FakeCUDA

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        self.cuda.work(1.0)
        return x * self.weight


class Greedy(Plugin):
    """Makes the device work at each call that it looks at, as plugins do that look at tensors."""

    name = "greedy"
    sampled = ("forward_pre", "forward")
    longest = 1
    cuda: FakeCUDA

    @hookimpl
    def forward_pre(self, module):
        self.cuda.work(100.0)

    @hookimpl
    def forward(self, module):
        self.cuda.work(100.0)


def net() -> nn.Module:
    return nn.Sequential(nn.Sequential(Work(), Work()), Work())


EXPECTED = {"(root)": 3.0, "0": 2.0, "0.0": 1.0, "0.1": 1.0, "1": 1.0}


def train(model, steps, each=lambda: None):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        each()


def a_call(hook, steps) -> dict[str, float]:
    """Return the seconds of the device for each call."""
    return {name: seconds / steps for (name,), seconds in hook.metric("timing_forward_device_seconds").items()}


@pytest.mark.parametrize("every", [1, 4])
def test_seconds_of_the_device_are_what_it_took_without_the_events_of_modules_inside(hook, cuda, every):
    hook.start("timing", every=every)
    train(net(), 1200)
    assert a_call(hook, 1200) == pytest.approx(EXPECTED, rel=0.05)


def test_what_other_plugins_launch_is_not_in_them(hook, cuda):
    Greedy.every = Greedy.longest = 10
    hook.start("timing", Greedy, every=3)
    train(net(), 2000)
    assert a_call(hook, 2000) == pytest.approx(EXPECTED, rel=0.05)


def test_in_steps_in_which_others_look_nothing_is_measured(hook, cuda):
    Greedy.every = Greedy.longest = 1
    hook.start("timing", Greedy)
    train(net(), 60)
    assert hook.metric("timing_forward_device_seconds") == {}
    assert hook.value("timing_backward_calls", "(root)") > 0, "all else is sampled"


def test_what_a_step_is_timed_for_and_the_first_one_is_not_measured(hook, cuda):
    """Graphs are hooked in one sampled step, forward calls timed in the next; a model as a whole where neither is done."""
    records: deque[int] = deque()
    hook.start("timing", every=2)
    train(net(), 16, lambda: records.append(cuda.records))
    steps = [after - before for before, after in zip([0, *records], records, strict=False)]
    assert steps[:6] == [0, 0, 0, 2, 0, 0], "kernels are loaded in the first; then the root's forward"
    assert set(steps[6:]) == {0, 2, 4}, "two events for each call of one depth"
    assert set(steps[7::2]) <= {0, 2}, "in steps that are not sampled, a model as a whole"


def test_wall_times_of_backwards_stand_for_all_steps(hook, cuda):
    hook.start("timing", every=5)
    train(net(), 400)
    assert hook.value("timing_backward_calls", "(root)") == pytest.approx(400, rel=0.05)


def test_what_is_measured_stands_for_all_steps_however_often_the_plugin_looks():
    context = SimpleNamespace(step=0, interval=1, is_alone=True)
    rotation = hookd_timing.device.Rotation(context, 1)
    stood_for = dict.fromkeys(range(3), 0)
    for interval in (1, 20, 2, 1):
        context.interval = interval
        for _ in range(200):
            context.step += 1
            context.is_alone = context.step % 7 != 0
            for depth in range(3) if context.step % interval == 0 else ():
                stood_for[depth] += rotation.weight() if rotation.meet(depth) else 0
    assert stood_for == dict.fromkeys(range(3), pytest.approx(800, abs=3))


def test_the_end_is_before_what_others_do_and_the_beginning_after_it(hook, cuda):
    order = []

    class Both(Plugin):
        name = "both"

        @hookimpl
        def forward_pre(self, module):
            order.append((module.name, "pre", cuda.records))

        @hookimpl
        def forward(self, module):
            order.append((module.name, "post", cuda.records))

    hook.start("timing", Both, every=3)
    model = net()
    train(model, 60)
    counts = [count for name, _, count in order if name == "1"]
    assert {after - before for before, after in zip(counts[::2], counts[1::2], strict=True)} == {0, 2}, "both, or none"


def test_a_model_that_comes_to_the_device_after_the_attach_is_measured(hook, cuda):
    cuda.is_in_use = False
    hook.start("timing", every=1)
    model = net()
    train(model, 3)
    assert hook.metric("timing_forward_device_seconds") == {}
    cuda.is_in_use = True
    train(model, 20)
    assert set(a_call(hook, 1)) == set(EXPECTED)
    backward = Counter(name for (name,) in hook.metric("timing_backward_device_seconds"))
    assert set(backward) == set(EXPECTED)
