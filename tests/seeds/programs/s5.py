"""S5: the return value of a hook of `Tensor.register_hook` becomes the tensor's gradient, whoever else looks at it.

Arguments: `plain`, or `torch`: torch's own hooks on the outputs of the chosen modules, the oracle of `output` in
plugins/gradients.py. Every number is a small integer, so that no order of summation matters.
"""

import sys

import torch
from torch import nn

ORACLE = "torch" in sys.argv


class ChosenTimes(nn.Module):
    def __init__(self):
        super().__init__()
        if ORACLE:  # torch's own module hook: it runs after the hooks of the output tensor
            self.register_full_backward_pre_hook(lambda m, grads: tuple(g * 3 for g in grads))

    def forward(self, x):
        return x * 4


class ChosenPair(nn.Module):
    def forward(self, x):
        pair = x * 2, {"deep": [x * 5]}
        if ORACLE:
            pair[0].register_hook(lambda g: g * 3)
            pair[1]["deep"][0].register_hook(lambda g: g * 3)
        return pair


def reported(name, change):
    def hook(grad):
        print(name, "had", grad.tolist())
        return change(grad)

    return hook


def run(name, leaf):
    a = torch.tensor([1.0, -2.0], requires_grad=True)
    x = a if leaf else a * 2
    x.register_hook(reported(name + ": the input", lambda g: g + 1))
    x.register_hook(reported(name + ": the input again", lambda g: None))
    if not leaf:
        x.retain_grad()
    y = ChosenTimes()(x)
    y.register_hook(reported(name + ": the output", lambda g: g * 10))
    first, rest = ChosenPair()(y)
    z = first + rest["deep"][0]
    z.register_hook(reported(name + ": the sum", lambda g: -g))
    z.sum().backward()
    print(name, x.grad.tolist(), a.grad.tolist())


def removed():
    a = torch.tensor([1.0], requires_grad=True)
    y = ChosenTimes()(a)
    handle = y.register_hook(reported("removed", lambda g: g * 1000))
    handle.remove()
    y.sum().backward()
    print("removed", a.grad.tolist())


def raised():
    def hook(grad):
        raise KeyError("the user's own")

    a = torch.tensor([1.0], requires_grad=True)
    y = ChosenTimes()(a)
    y.register_hook(hook)
    try:
        y.sum().backward()
    except KeyError as error:
        print("raised", error, a.grad)


def accumulated():
    parameter = nn.Parameter(torch.tensor([1.0]))
    parameter.register_post_accumulate_grad_hook(lambda p: print("accumulated", p.grad.tolist()))
    parameter.register_hook(lambda g: g * 7)
    (ChosenTimes()(parameter) * 2).sum().backward()


for leaf in (True, False):
    run("leaf" if leaf else "middle", leaf)
removed()
raised()
accumulated()
