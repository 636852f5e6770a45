"""S7: the result may be a dict, a tuple, a list, nested; a result without grad_fn is left alone."""

import dataclasses
from typing import NamedTuple

import torch
from torch import nn


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    cache: object = None


class Returns(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, x):
        return self.what(x)


SHAPES = {
    "tensor": lambda x: x * 2,
    "tuple": lambda x: (x * 2, x * 3),
    "list": lambda x: [x * 2],
    "dict": lambda x: {"text": "no tensor", "a": x * 2, "b": x * 3},
    "nested": lambda x: {"a": [("first", (x * 2,))], "b": None},
    "namedtuple": lambda x: Pair(x * 2, x * 3),
    "dataclass": lambda x: Output(x * 2, cache=[x * 3]),
    "some": lambda x: (x.detach(), None, x * 2),
    "none": lambda x: None,
    "number": lambda x: 3,
    "detached": lambda x: x.detach() * 2,
    "integers": lambda x: x.long(),
    "itself": lambda x: x,
    "generator": lambda x: (x * i for i in (2, 3)),
}


def flat(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        value = value.values()
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        return []
    return [tensor for item in value for tensor in flat(item)]


class Model(nn.ModuleDict):
    def forward(self, name, x):
        return self[name](x)


model = Model({name: Returns(what) for name, what in SHAPES.items()})
for name in SHAPES:
    a = torch.tensor([1.0, 2.0], requires_grad=True)
    result = model(name, a * 1)
    found = [tensor for tensor in flat(result) if tensor.requires_grad]
    if found:
        sum(tensor.sum() for tensor in found).backward()
    print(name, type(result).__name__, len(found), None if a.grad is None else a.grad.tolist(), flush=True)
with torch.no_grad():
    print("no_grad", model("dict", torch.ones(2, requires_grad=True))["a"].requires_grad)
