"""Forward calls that no backward follows are counted apart from the training: real loops, compared with their own counts."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from tests.support.clock import Clock

CALLS: Counter[str] = Counter()
CLOCK = Clock()
STEP_S, LONG_S = 0.01, 1.0


class Counted(nn.Module):
    """Counts its calls by the kind that the loop has announced."""

    kind = ""

    def __init__(self):
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        CALLS[type(self).__name__, self.kind] += 1
        CLOCK.advance(LONG_S if self.kind == "inference" else STEP_S)
        return self.norm(self.fc(x))


class Teacher(Counted):
    pass


def of_kind(kind, model, x=None):
    model.kind = kind
    return model(torch.randn(2, 4) if x is None else x)


def train(model, optimizer, **others):
    optimizer.zero_grad()
    out = of_kind("training", model)
    for other in others.values():
        out = out + other()
    nn.MSELoss()(out, torch.zeros_like(out)).backward()
    optimizer.step()


def validation(model, optimizer):
    train(model, optimizer)
    model.eval()
    with torch.no_grad():
        for at in range(3):
            CLOCK.advance(LONG_S * (at > 0))
            of_kind("inference", model)
    model.train()


def validation_with_gradients(model, optimizer):
    train(model, optimizer)
    model.eval()
    for at in range(3):
        CLOCK.advance(LONG_S * (at > 0))
        nn.MSELoss()(of_kind("inference", model), torch.zeros(2, 4))
    model.train()


def rollout(model, optimizer):
    with torch.inference_mode():
        for at in range(5):
            CLOCK.advance(LONG_S * (at > 0))
            of_kind("inference", model)
    for _ in range(2):
        train(model, optimizer)


def frozen_statistics(model, optimizer):
    train(model.eval(), optimizer)


TEACHER = Teacher().eval()


def teacher(model, optimizer):
    with torch.no_grad():
        target = of_kind("inference", TEACHER)
    train(model, optimizer, target=lambda: target)


def teacher_in_the_loss(model, optimizer):
    train(model, optimizer, target=lambda: of_kind("training", TEACHER))


LOOPS = (validation, validation_with_gradients, rollout, frozen_statistics, teacher, teacher_in_the_loss)


@pytest.mark.parametrize("in_c", [True, False], ids=["c", "python"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_calls_of_each_kind_are_those_of_the_loop(hook, monkeypatch, loop, in_c):
    if not in_c:
        monkeypatch.setenv("HOOKD_ENTRY", "0")
    hook.pretend(clock=CLOCK)
    hook.start("timing")
    model = Counted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):  # the first call of a model that is trained in `eval()` is taken for inference
        loop(model, optimizer)
    CALLS.clear()
    before = counts(hook)
    for _ in range(4):
        loop(model, optimizer)
    grown = counts(hook) - before
    for name, of_class in ((".norm", "Counted"), (".norm", "Teacher")):
        prefix = "#Teacher" if of_class == "Teacher" else ""
        for kind, direction in (("training", "forward"), ("inference", "inference")):
            reported = grown[direction, (prefix + name).lstrip(".")], grown[direction, (prefix + ".(root)").lstrip(".")]
            assert reported == (CALLS[of_class, kind],) * 2, (of_class, kind, grown)


def counts(hook):
    return Counter(
        {
            (direction, name): number
            for direction in ("forward", "inference")
            for (name,), number in hook.metric(f"timing_{direction}_calls").items()
        }
    )


@pytest.mark.parametrize("loop", [validation, validation_with_gradients, rollout], ids=lambda loop: loop.__name__)
def test_the_time_of_inference_is_no_part_of_a_step(hook, loop):
    hook.pretend(clock=CLOCK)
    hook.start("timing", every=1)
    model = Counted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loop(model, optimizer)
    before, began = hook.value("timing_phase_seconds", "inference"), CLOCK.ns
    for _ in range(120):
        loop(model, optimizer)
    (times,) = (family for family in hook.read().families if family.name == "hookd_step_seconds")
    *counts, seconds = times.series[0][1]
    assert seconds / sum(counts) == pytest.approx(STEP_S)
    passed_s, steps = (CLOCK.ns - began) / 1e9, 240 if loop is rollout else 120
    inferred_s = hook.value("timing_phase_seconds", "inference") - before
    assert passed_s - inferred_s == pytest.approx(steps * STEP_S, abs=5 * LONG_S)  # of the last step, or of none


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("of", [torch.jit.script, torch.compile])
def test_a_model_of_another_kind_is_called_as_ever(hook, of):
    hook.start("timing")
    model = of(nn.Sequential(nn.Linear(4, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    with torch.no_grad():
        model.eval()(torch.ones(2, 4))
    (name,) = (name for (name,) in hook.metric("timing_inference_calls") if name.endswith("(root)"))
    assert hook.value("timing_forward_calls", name) == 2
    assert hook.value("timing_inference_calls", name) == 1
