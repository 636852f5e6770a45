"""hookd.api.hookspecs is the reference for authors: each hook is documented completely, and its example runs."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap

import pytest
import torch
from torch import nn

from hookd import Plugin, hookimpl
from hookd.api import hookspecs
from hookd.testing import FakeTarget, Training

HOOKS = sorted(hookspecs.HOOKS)
FIELDS = ("Called", "Thread", "May", "Cost")


def example(hook):
    """Return the example of a hook as source."""
    text = inspect.getdoc(getattr(hookspecs, hook))
    return textwrap.dedent("    " + text[text.index("@hookimpl") :])


class Example(Plugin):
    """Declares the names that the examples use."""

    name = "example"

    @hookimpl
    def configure(self, context):
        self.context = context
        for name in ("calls", "seconds", "phase_seconds", "seen"):
            setattr(self, name, context.counter(name, f"{name}.", ["module"]))
        for name in ("norm", "training"):
            setattr(self, name, context.gauge(name, f"{name}.", ["module"]))
        for name in ("bad", "evaluations", "loss_seconds", "step_seconds", "steps"):
            setattr(self, name, context.counter(name, f"{name}."))
        for name in ("alive", "loss_value", "lr"):
            setattr(self, name, context.gauge(name, f"{name}."))
        self.last, self.since_ns = "other", 0


def broken():
    model = nn.Linear(2, 2)
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 3))


def not_finite():
    model = nn.Sequential(nn.Linear(2, 2))
    for number in (1.0, torch.nan):
        model(torch.full((1, 2), number))


def closure():
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def again():
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    optimizer.step(again)


def work(target):
    """Trigger every hook: steps, train and eval, an error, a NaN, a closure, a second, a new object."""
    target.run_steps(2)
    target.training.model.eval()
    broken()
    not_finite()
    closure()
    target.tick(1.0)
    target.renew("example")
    target.run_steps(1)


@pytest.mark.parametrize("hook", HOOKS)
def test_the_example_runs(hook):
    space = {"hookimpl": hookimpl, "torch": torch}
    exec(compile(example(hook), f"<the example of {hook}>", "exec"), space)
    base = Example if hook != "configure" else Plugin
    beside = {"forward": hookimpl(lambda self: None)} if hook == "select" else {}  # which else has nothing to choose
    plugin = type("Example", (base,), {"name": "example", hook: space[hook], **beside})
    with FakeTarget() as target:
        target.start(plugin)
        work(target)
        target.stop_clean()
        assert target.calls(hook), f"{hook} was never called"


@pytest.mark.parametrize("hook", HOOKS)
def test_it_says_when_where_what_and_at_what_cost(hook):
    text = inspect.getdoc(getattr(hookspecs, hook))
    for field in FIELDS:
        assert re.search(rf"^{field}: \w.*[^.]\.$", text, re.MULTILINE), f"{hook} has no line '{field}: ….'"


@pytest.mark.parametrize("hook", HOOKS)
def test_the_example_asks_for_no_other_arguments(hook):
    (function,) = ast.parse(example(hook)).body
    asked = {one.arg for one in function.args.args[1:]}
    assert asked <= set(inspect.signature(getattr(hookspecs, hook)).parameters)


def test_all_names_what_there_is():
    marked = {name for name, value in vars(hookspecs).items() if hasattr(value, "hookd_spec")}
    assert marked == hookspecs.HOOKS
    assert marked < set(hookspecs.__all__)


def test_training_is_what_a_test_makes_of_it():
    model = nn.Linear(2, 1)
    training = Training(model, lambda step: (torch.full((1, 2), float(step)),))
    assert training.step() != training.step()
    assert training.steps == 2
