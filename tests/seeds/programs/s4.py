"""S4: a backward hook replaces the gradient that flows to the module's input.

Arguments: `plain`, or `torch` with `ones` or `clamp`: torch's own full backward hooks, the oracle of
plugins/gradients.py. Every number is a small integer, so that no order of summation matters. Where torch's hook
raises or never fires (in-place operations, dict outputs), the oracle runs the same mathematics without them.
"""

import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

ORACLE = {"ones": torch.ones_like, "clamp": lambda g: g.clamp(-1, 1)}.get(sys.argv[-1])
CASES = {}


def replace(module, grad_input, grad_output):
    return tuple(None if g is None else ORACLE(g) for g in grad_input)


def chosen(module):
    if ORACLE is not None:
        module.register_full_backward_hook(replace)
    return module


def case(function):
    CASES[function.__name__] = function
    return function


def show(value):
    return value.tolist() if isinstance(value, torch.Tensor) else value


class ChosenTimes(nn.Module):
    """Returns x * 4, or another multiple on request."""

    def __init__(self, by=4.0):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(by))

    def forward(self, x):
        return x * self.weight


class ChosenFanOut(nn.Module):
    def forward(self, x):
        return x * 5 - x * 3 + (x * x)


class ChosenResidual(nn.Module):
    def forward(self, x):
        return x + x * 6


class ChosenTwo(nn.Module):
    def forward(self, x, y):
        return x * 3 - y * 7


class ChosenSecond(nn.Module):
    def forward(self, x, y):
        return y * 2


class ChosenUnused(nn.Module):
    """Returns two outputs of one input; a caller that uses only one of them must not lose its gradient."""

    def forward(self, x):
        x * 11  # a branch that nobody uses
        return x * 2, x * 3


class ChosenNested(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = chosen(ChosenTimes(9.0))

    def forward(self, x):
        return self.inner(x) * 2 + x


class ChosenIdentity(nn.Identity):
    pass


class ChosenInner(nn.Module):
    def forward(self, x):
        return x * 8, x * -2


class ChosenDict(nn.Module):
    """With torch's hooks its tuple is made by a chosen module and its dict outside, where the hook does not fire."""

    def forward(self, x):
        return {"a": x * 8, "b": [x * -2]}


class ChosenInPlace(nn.Module):
    """Doubles and rectifies a tensor of its own in place."""

    def forward(self, x):
        y = x * 4
        if ORACLE is None:
            return y.mul_(2).relu_()
        return (y * 2).relu()


class ChosenInPlaceInput(nn.Module):
    """Changes its own input in place."""

    def forward(self, x):
        return x.mul_(3) if ORACLE is None else x * 3


class ChosenStops(nn.Module):
    def forward(self, x):
        return x.detach() * 2 + x


def middle():
    """Return a leaf and a tensor that is not a leaf: [1, -2, 3] and twice that."""
    a = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
    return a, a * 2


@case
def linear_of_the_row():
    linear = chosen(nn.Linear(10, 20))
    with torch.no_grad():
        linear.weight.copy_(torch.arange(200.0).view(20, 10) - 100)
        linear.bias.zero_()
    a = torch.randn(3, 10, requires_grad=True)
    torch.sum(linear(a)).backward()
    return a.grad, linear.weight.grad.shape, linear.bias.grad


@case
def leaf():
    module = chosen(ChosenTimes())
    a, _ = middle()
    module(a).sum().backward()
    return a.grad, module.weight.grad


@case
def no_leaf():
    a, h = middle()
    chosen(ChosenTimes())(h).sum().backward()
    return (a.grad,)


@case
def fan_out_outside():
    a, h = middle()
    (chosen(ChosenTimes())(h) + h * h).sum().backward()
    return (a.grad,)


@case
def fan_out_outside_of_a_leaf():
    a, _ = middle()
    (chosen(ChosenTimes())(a) + a * a).sum().backward()
    return (a.grad,)


@case
def fan_out_inside():
    a, h = middle()
    chosen(ChosenFanOut())(h).sum().backward()
    return (a.grad,)


@case
def fan_out_inside_and_outside_of_a_leaf():
    a, _ = middle()
    (chosen(ChosenFanOut())(a) * 3 + a * 5).sum().backward()
    return (a.grad,)


@case
def residual_inside():
    a, h = middle()
    chosen(ChosenResidual())(h).sum().backward()
    return (a.grad,)


@case
def residual_outside():
    a, h = middle()
    (h + chosen(ChosenTimes())(h)).sum().backward()
    return (a.grad,)


@case
def two_users_of_one_input():
    a, h = middle()
    (chosen(ChosenTimes())(h) + chosen(ChosenFanOut())(h)).sum().backward()
    return (a.grad,)


@case
def a_chain():
    a, h = middle()
    chosen(ChosenTimes())(chosen(ChosenFanOut())(h)).sum().backward()
    return (a.grad,)


@case
def nested():
    a, h = middle()
    module = chosen(ChosenNested())
    module(h).sum().backward()
    return a.grad, module.inner.weight.grad


@case
def two_inputs():
    (a, h), (b, k) = middle(), middle()
    chosen(ChosenTwo())(h, k).sum().backward()
    return a.grad, b.grad


@case
def two_inputs_from_one_node():
    a, _ = middle()
    first, second = (torch.stack([a, a]) * 2).unbind(0)
    chosen(ChosenTwo())(first, second).sum().backward()
    return (a.grad,)


class ChosenTwoOfOne(nn.Module):
    def forward(self, x):
        return x * 3 - x * 7


@case
def the_same_input_twice():
    """torch's hook would see each position by itself; a graph without nodes of ours knows only the sum of both."""
    a, h = middle()
    (ChosenTwo()(h, h) if ORACLE is None else chosen(ChosenTwoOfOne())(h)).sum().backward()
    return (a.grad,)


@case
def an_input_that_needs_no_gradient():
    a, h = middle()
    module = chosen(ChosenTwo())
    (module(h, torch.ones(3)) + module(h.detach(), h)).sum().backward()
    return (a.grad,)


@case
def an_input_that_is_not_used():
    """torch's hook would give it a gradient of zeros, and the hook's answer; without it there is nothing to replace."""
    (a, h), (b, k) = middle(), middle()
    (ChosenSecond()(h, k) if ORACLE is None else chosen(ChosenTimes(2.0))(k)).sum().backward()
    return a.grad, b.grad


@case
def no_input_needs_a_gradient():
    module = chosen(ChosenTimes())
    module(torch.ones(3)).sum().backward()
    return (module.weight.grad,)


@case
def an_unused_output():
    a, h = middle()
    first, _ = chosen(ChosenUnused())(h)
    first.sum().backward()
    return (a.grad,)


@case
def both_outputs():
    a, h = middle()
    first, second = chosen(ChosenUnused())(h)
    (first - second * 2).sum().backward()
    return (a.grad,)


@case
def one_output_after_the_other():
    a, h = middle()
    first, second = chosen(ChosenUnused())(h)
    second.sum().backward(retain_graph=True)
    first.sum().backward()
    return (a.grad,)


@case
def identity():
    a, h = middle()
    (chosen(ChosenIdentity())(h) * 6).sum().backward()
    return (a.grad,)


@case
def identity_of_a_leaf():
    a, _ = middle()
    (chosen(ChosenIdentity())(a) * 6 + a * 2).sum().backward()
    return (a.grad,)


@case
def a_shared_module():
    a, h = middle()
    module = chosen(ChosenTimes())
    module(module(h) * 2).sum().backward()
    return a.grad, module.weight.grad


@case
def a_dict_output():
    a, h = middle()
    if ORACLE is None:
        out = ChosenDict()(h)
    else:
        first, second = chosen(ChosenInner())(h)
        out = {"a": first, "b": [second]}
    (out["a"] - out["b"][0]).sum().backward()
    return (a.grad,)


@case
def in_place_inside():
    a, h = middle()
    chosen(ChosenInPlace())(h).sum().backward()
    return (a.grad,)


@case
def in_place_on_the_input():
    a, h = middle()
    chosen(ChosenInPlaceInput())(h).sum().backward()
    return (a.grad,)


@case
def in_place_on_the_output():
    a, h = middle()
    y = chosen(ChosenTimes())(h)
    if ORACLE is None:
        y += h
        y.mul_(3)
    else:
        y = (y + h) * 3
    y.sum().backward()
    return (a.grad,)


@case
def in_place_on_the_output_of_identity():
    a, h = middle()
    y = chosen(ChosenIdentity())(h)
    y = y.mul_(5) if ORACLE is None else y * 5
    y.sum().backward()
    return (a.grad,)


@case
def a_chain_in_place():
    a, h = middle()
    chosen(ChosenInPlaceInput())(chosen(ChosenInPlaceInput())(h)).sum().backward()
    return (a.grad,)


@case
def checkpointed_reentrant():
    a, h = middle()
    checkpoint(chosen(ChosenFanOut()), h, use_reentrant=True).sum().backward()
    return (a.grad,)


@case
def checkpointed_nonreentrant():
    a, h = middle()
    checkpoint(chosen(ChosenFanOut()), h, use_reentrant=False).sum().backward()
    return (a.grad,)


@case
def checkpointed_around():
    a, h = middle()
    times, fan_out = chosen(ChosenTimes()), chosen(ChosenFanOut())
    for reentrant in (True, False):
        (checkpoint(lambda x: fan_out(times(x)) + x, h, use_reentrant=reentrant)).sum().backward(retain_graph=True)
    return a.grad, times.weight.grad


@case
def a_slice():
    a, h = middle()
    (chosen(ChosenTimes())(h[:2]).sum() + h.sum() * 2).backward()
    return (a.grad,)


@case
def backward_twice():
    a, h = middle()
    y = chosen(ChosenFanOut())(h).sum()
    y.backward(retain_graph=True)
    y.backward()
    return (a.grad,)


@case
def grad_of():
    a, h = middle()
    y = chosen(ChosenFanOut())(h).sum()
    return torch.autograd.grad(y, [h, a])


@case
def a_stopped_branch():
    a, h = middle()
    chosen(ChosenStops())(h).sum().backward()
    return (a.grad,)


@case
def without_grad():
    with torch.no_grad():
        y = chosen(ChosenTimes())(torch.ones(3, requires_grad=True))
    return y, y.requires_grad


@case
def gradients_accumulate_over_calls():
    a, _ = middle()
    module = chosen(ChosenTimes())
    for _ in range(3):
        module(a).sum().backward()
    return a.grad, module.weight.grad


@case
def a_list_as_input():
    """hookd leaves gradients of tensors inside containers alone, as torch does."""

    class ChosenList(nn.Module):
        def forward(self, xs):
            return xs[0] * 9

    a, h = middle()
    chosen(ChosenList())([h]).sum().backward()
    return (a.grad,)


def run(name):
    try:
        print(name, [show(value) for value in CASES[name]()], flush=True)
    except RuntimeError as error:
        print(name, "raised", type(error).__name__, error, flush=True)


torch.manual_seed(0)
for name in CASES:
    run(name)
