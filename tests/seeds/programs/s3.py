"""S3: the return value of a pre-hook is the input, that of a forward hook is the result, and the next hook sees it.

`torch` as argument registers torch's own hooks, the oracle of plugins/inputs.py.
"""

import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def show(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {name: show(item) for name, item in value.items()}
    return tuple(map(show, value)) if isinstance(value, tuple) else value


class ChosenScale(nn.Module):
    def forward(self, x):
        print("scale sees", x.tolist())
        return x * 10


class ChosenKeywords(nn.Module):
    def forward(self, x, *, plus, minus=0):
        print("keywords sees", x.tolist(), plus.tolist(), float(minus))
        return x + plus - minus


class ChosenOptional(nn.Module):
    def forward(self, x=None):
        print("optional sees", x)
        return torch.tensor([5.0])


class ChosenPair(nn.Module):
    def forward(self, x, y=None):
        print("pair sees", show(x), show(y))
        return x, x + 1


class Square(nn.Module):
    def forward(self, x):
        return x * x  # needs x in its backward: that of the first run and of the recomputation have to agree


class Other(nn.Module):
    def forward(self, x):
        print("other sees", show(x))
        return x


def double_input(module, inputs):
    return inputs[0] * 2 if inputs else None


def shift_input(module, inputs, kwargs):
    if isinstance(module, ChosenOptional):
        return (), kwargs
    return (inputs[0] + 1, *inputs[1:]), {name: value - 1 for name, value in kwargs.items()}


def triple_output(module, inputs, output):
    return None if isinstance(module, ChosenPair) else output * 3


def shift_output(module, inputs, output):
    if isinstance(module, ChosenPair):
        return {"first": output[0], "second": output[1]}
    return output - inputs[0] if inputs else output - 1


scale, keywords, optional, pair, other = ChosenScale(), ChosenKeywords(), ChosenOptional(), ChosenPair(), Other()
if "torch" in sys.argv:
    for module in (scale, keywords, optional, pair):
        module.register_forward_pre_hook(double_input)
        module.register_forward_pre_hook(shift_input, with_kwargs=True)
        module.register_forward_hook(triple_output)
        module.register_forward_hook(shift_output)
a = torch.tensor([1.0, -2.0], requires_grad=True)
result = nn.Sequential(other, scale, other)(a)
print("scaled", result.tolist())
result.sum().backward()
print("gradient", a.grad.tolist())
print("keywords", keywords(a, plus=torch.tensor([4.0, 8.0])).tolist())
print("keywords", keywords(a, plus=torch.tensor([4.0, 8.0]), minus=torch.tensor(2.0)).tolist())
print("optional", optional(a).tolist())
print("nothing given", optional().tolist())
print("pair", show(pair(a, torch.tensor([3.0]))))
for reentrant in (True, False):
    b = torch.tensor([1.0, -2.0], requires_grad=True)
    checkpointed = checkpoint(nn.Sequential(scale, Square()), b * 1, use_reentrant=reentrant)
    checkpointed.sum().backward()
    print("checkpointed", checkpointed.tolist(), b.grad.tolist())
