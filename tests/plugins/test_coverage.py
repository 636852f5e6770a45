"""hookd_coverage lists modules that are not seen, switches of mode, hooks of others, and the parts of each module."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn


class Net(nn.Module):
    """Calls its first layer, and goes past the second."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.b.forward(self.a(x)))


def train(model, steps=3):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()


def observe(hook, model, steps=6):
    """Take enough steps for a tour that sees everything at once."""
    hook.start("coverage", every=1)
    train(model, steps)


# -- what is not seen


def test_what_is_bypassed_or_never_called_is_listed(hook):
    model = Net()
    observe(hook, model)
    assert hook.metric("coverage_unseen") == {("b", "bypassed"): 1, ("c", "never_called"): 1}
    assert any("not observed: b:" in line for line in hook.logs)
    assert hook.incidents == [], "that is a limit of ours and nothing wrong with the training"


def test_a_bypassed_module_is_logged_once_however_many_tours_find_it(hook):
    observe(hook, Net(), steps=12)
    assert len([line for line in hook.logs if "not observed: b:" in line]) == 1


def test_what_is_seen_after_all_is_listed_no_longer(hook):
    model = Net()
    observe(hook, model)
    model.forward = lambda x: model.norm(model.c(model.b(model.a(x))))
    train(model, 6)
    assert hook.metric("coverage_unseen") == {}


def test_what_is_called_under_a_transform_is_listed_as_long_as_it_is(hook):
    class Physical(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer, self.is_plain = nn.Linear(4, 4), nn.Linear(4, 1), False

        def forward(self, x):
            return self.outer(self.inner(x) if self.is_plain else torch.func.vmap(self.inner)(x))

    model = Physical()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook.start("coverage", every=1)

    def train(steps):
        for _ in range(steps):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

    train(4)
    assert ("inner", "transformed") in hook.metric("coverage_unseen")
    assert [state for name, state in hook.metric("coverage_unseen") if name in ("outer", "(root)")] == []
    model.is_plain = True
    train(4)
    assert hook.metric("coverage_unseen") == {}


@pytest.mark.filterwarnings("ignore")  # torch's own
def test_of_what_is_scripted_the_outermost_is_listed(hook):
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    model = nn.Sequential(nn.Linear(4, 4), scripted)
    observe(hook, model)
    assert hook.metric("coverage_unseen") == {("1", "scripted"): 1}


@pytest.mark.filterwarnings("ignore")  # torch's own
def test_of_what_is_compiled_the_outermost_is_listed(hook):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    model[1] = torch.compile(model[1], backend="eager")
    observe(hook, model)
    assert set(hook.metric("coverage_unseen")) == {("1.0", "compiled"), ("1.1", "compiled")}, "1 itself is seen"


# -- modes


def test_a_switch_of_mode_counts_once_for_the_module_it_was_made_on(hook):
    model = Net()
    hook.start("coverage", every=1)
    train(model, 1)
    for _ in range(3):
        model.eval()
        model.train()
    model.norm.eval()
    assert hook.metric("coverage_mode_switches") == {
        ("(root)", "eval"): 3, ("(root)", "train"): 3, ("norm", "eval"): 1
    }  # fmt: skip


def test_the_mode_of_the_last_call_is_shown(hook):
    model = Net()
    model.norm.eval()
    hook.start("coverage", every=1)
    train(model, 1)
    assert hook.metric("coverage_training") == {("(root)",): 1, ("a",): 1, ("norm",): 0}


# -- hooks and state


def outside(*_):
    pass


class Callable:
    def __call__(self, *_):
        pass


def test_hooks_of_others_are_shown_with_where_they_are_from(hook):
    model = Net()
    model.a.register_forward_hook(outside)
    model.a.register_forward_hook(functools.partial(outside, 1))
    model.a.register_forward_pre_hook(Callable())
    model.norm.register_load_state_dict_post_hook(outside)
    handle = model.norm.register_full_backward_pre_hook(outside)
    observe(hook, model)
    assert hook.metric("coverage_hooks") == {
        ("a", "forward", f"{__name__}:outside"): 2,
        ("a", "forward_pre", f"{__name__}:Callable"): 1,
        ("norm", "load_state_dict", f"{__name__}:outside"): 1,
        ("norm", "backward_pre", f"{__name__}:outside"): 1,
    }
    handle.remove()
    train(model, 6)
    assert ("norm", "backward_pre", f"{__name__}:outside") not in hook.metric("coverage_hooks")


def test_no_more_hooks_are_shown_than_asked_for(hook):
    model = Net()
    for module in (model.a, model.b, model.c):
        module.register_forward_hook(outside)
    hook.start("coverage", every=1, hooks=2)
    train(model, 6)
    assert len(hook.metric("coverage_hooks")) == 2


def test_what_each_module_holds_is_counted(hook):
    model = Net()
    model.b.bias.requires_grad_(False)
    model.a.register_buffer("scratch", torch.zeros(7), persistent=False)
    observe(hook, model)
    assert hook.metric("coverage_elements") == {
        ("a", "parameter"): 20, ("a", "transient"): 7, ("b", "parameter"): 16, ("b", "frozen"): 4,
        ("c", "parameter"): 20, ("norm", "parameter"): 8, ("norm", "buffer"): 9,
    }  # fmt: skip


def test_a_tour_in_portions_sees_everything_in_the_end(hook):
    model = Net()
    hook.start("coverage", every=1, modules=1)
    train(model, 2)
    assert len({module for module, _ in hook.metric("coverage_elements")}) <= 2
    train(model, 12)
    assert {module for module, _ in hook.metric("coverage_elements")} == {"a", "b", "c", "norm"}


def test_training_is_bit_identical(hook):
    def weights():
        torch.manual_seed(1)
        model = Net()
        train(model, 5)
        return torch.cat([p.detach().view(-1) for p in model.parameters()])

    plain = weights()
    hook.start("coverage", every=1)
    assert torch.equal(weights(), plain)
