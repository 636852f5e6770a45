"""How many floating-point operations a call of a common layer takes, and its backward. Runs in the target.

Counted are the matrix products and convolutions, a multiplication and an addition as two operations, as in
torch/utils/flop_counter.py (2.13), against which every formula is tested. Biases, norms and activations are not counted
there either.

    Linear              2 * batch * in * out, with batch all dimensions but the last
    Conv                2 * batch * positions of the output * channels out * channels in / groups * kernel
    ConvTranspose       the same with the positions of the input, for it is a convolution's backward
    MultiheadAttention  Linear for q, k, v and the output, and 2 products of batch * heads * target * source * head,
                        whichever kernel makes them; what a kernel computes anew in its backward is not counted
    RNN, LSTM, GRU      per layer and direction 1, 4 or 3 gates: Linear of the input and of the state, at each time, and
                        of an LSTM's projection

The backward of a product takes as much as the product for each of its two factors that needs a gradient.
"""

from __future__ import annotations

from collections import deque
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookd import Module


class Cost(NamedTuple):
    """Operations of one call, and of its backward."""

    forward: int
    backward: int


def _product(flops: int, module: nn.Module, x: torch.Tensor) -> Cost:
    return Cost(flops, flops * (x.requires_grad + _trains(module.weight)))


def _trains(weight: Any) -> bool:
    return bool(weight is not None and weight.requires_grad)


def _linear(module: Any, x: torch.Tensor) -> Cost:
    return _product(2 * x.numel() * module.out_features, module, x)


def _conv(module: Any, x: torch.Tensor) -> Cost:
    spatial = x.shape[-len(module.kernel_size) :]
    positions = prod(
        (size + _padding(module, at) - module.dilation[at] * (module.kernel_size[at] - 1) - 1) // module.stride[at] + 1
        for at, size in enumerate(spatial)
    )
    batch = x.numel() // (module.in_channels * prod(spatial))
    per_position = module.out_channels * module.in_channels // module.groups * prod(module.kernel_size)
    return _product(2 * batch * positions * per_position, module, x)


def _padding(module: Any, at: int) -> int:
    """Give what is added to a dimension, on both sides together; "same" keeps its size, with stride 1 alone."""
    if module.padding == "valid":
        return 0
    if module.padding == "same":
        return int(module.dilation[at] * (module.kernel_size[at] - 1))
    return int(2 * module.padding[at])


def _conv_transpose(module: Any, x: torch.Tensor) -> Cost:
    return _product(2 * x.numel() * module.out_channels // module.groups * prod(module.kernel_size), module, x)


def _attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Cost:
    sequence = 1 if module.batch_first and query.dim() == 3 else 0
    target, width = query.shape[sequence], module.embed_dim
    source = key.shape[sequence] + (module.bias_k is not None) + module.add_zero_attn
    batch = query.numel() // (target * width)
    inputs = [2 * x.numel() * width for x in (query, key, value)]
    output = 2 * query.numel() * width
    scores = 2 * 2 * batch * target * source * width
    trains = _trains(module.in_proj_weight if module.in_proj_weight is not None else module.q_proj_weight)
    needs = trains or query.requires_grad or key.requires_grad or value.requires_grad
    backward = sum(flops * (x.requires_grad + trains) for flops, x in zip(inputs, (query, key, value), strict=False))
    backward += needs * (2 * scores + output) + _trains(module.out_proj.weight) * output
    return Cost(sum(inputs) + scores + output, backward)


def _recurrent(module: Any, x: torch.Tensor) -> Cost:
    gates = {"LSTM": 4, "GRU": 3}.get(module.mode, 1) * module.hidden_size
    times = x.shape[1 if module.batch_first and x.dim() == 3 else 0]
    batch = x.numel() // (times * module.input_size)
    state = module.proj_size or module.hidden_size
    directions = 2 if module.bidirectional else 1
    trains = _trains(module.weight_ih_l0)
    forward = backward = 0
    for layer in range(module.num_layers):
        width = state * directions if layer else module.input_size
        of_input = directions * 2 * batch * times * width * gates
        of_state = directions * 2 * batch * state * gates
        projected = directions * 2 * batch * times * module.hidden_size * module.proj_size
        needs = layer > 0 or x.requires_grad
        forward += of_input + times * of_state + projected
        # The first state needs no gradient, so neither does the product with it have one for it.
        backward += of_input * (needs + trains) + of_state * (times - 1 + times * trains) + projected * (1 + trains)
    return Cost(forward, backward)


ONE = ("input",)
FORMULAS: dict[type, tuple[Callable[..., Cost], tuple[str, ...]]] = {
    nn.Linear: (_linear, ONE),
    nn.Conv1d: (_conv, ONE),
    nn.Conv2d: (_conv, ONE),
    nn.Conv3d: (_conv, ONE),
    nn.ConvTranspose1d: (_conv_transpose, ONE),
    nn.ConvTranspose2d: (_conv_transpose, ONE),
    nn.ConvTranspose3d: (_conv_transpose, ONE),
    nn.MultiheadAttention: (_attention, ("query", "key", "value")),
    nn.RNNBase: (_recurrent, ONE),
}
"""Formulas by class, subclasses included, and which arguments of `forward` they ask for."""


def has_formula(module: nn.Module | None) -> bool:
    """Whether the operations of a module can be told."""
    return any(kind in FORMULAS for kind in type(module).__mro__)


def cost(module: nn.Module | None, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Cost | None:
    """Count the operations of one call; None where there is no formula, or no plain tensors (a packed sequence)."""
    kinds = type(module).__mro__
    kind = next((kind for kind in kinds if kind in FORMULAS), None)
    if kind is None or LazyModuleMixin in kinds:  # a lazy one does not know its widths before its first call
        return None
    formula, names = FORMULAS[kind]
    values = [inputs[at] if at < len(inputs) else kwargs.get(name) for at, name in enumerate(names)]
    if not all(isinstance(value, torch.Tensor) and value.numel() for value in values):
        return None
    return formula(module, *values)


MOST_WAITING = 1024
"""Calls of one module: those of an evaluation wait for nothing, and there may be any number of them."""


class Call:
    """An outermost call of a sampled step, until its backward says that it was one of the training."""

    def __init__(self, root: int, samples: int) -> None:
        self.root = root  # the id of its module
        self.samples = samples
        self.flops = 0

    def take(self) -> tuple[int, int]:
        """Give the samples and the operations of its forward that have not been taken yet."""
        taken = self.samples, self.flops
        self.samples = self.flops = 0
        return taken


class Waiting:
    """The calls of layers, and of roots, in sampled steps that wait for their backward, and what that will take."""

    def __init__(self) -> None:
        self._waiting: dict[int, deque[tuple[int, Call]]] = {}
        self._before: dict[int, deque[tuple[int, Call]]] = {}  # from the sampled step before

    def forward(self, module: Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], call: Call) -> None:
        """Count the operations of one call inside of `call`."""
        found = cost(module.torch(), inputs, kwargs)
        if found is None and module.depth:
            return
        call.flops += found.forward if found is not None else 0
        waiting = self._waiting.setdefault(module.id, deque(maxlen=MOST_WAITING))
        waiting.append((found.backward if found is not None else 0, call))

    def backward(self, module: Module) -> tuple[int, int, int]:
        """Give a root, and its samples and operations that are certain now; the last call's backward comes first."""
        waiting = self._waiting.get(module.id) or self._before.get(module.id)
        if not waiting:
            return 0, 0, 0
        flops, call = waiting.pop()
        samples, of_forward = call.take()
        return call.root, samples, of_forward + flops

    def step_done(self) -> None:
        """Forget what has not come since the step before this one: the calls of an evaluation have no backward.

        Not what this step has left: of two optimizers' models one goes backward after the other's step.
        """
        self._before, self._waiting = self._waiting, {}
