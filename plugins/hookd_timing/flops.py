"""Count the floating-point operations of common layers, forward and backward.

Matrix products and convolutions are counted, a multiplication and an addition as two operations, as in
torch/utils/flop_counter.py (2.13), against which every formula is tested. Biases, norms and activations are not
counted, as there.

    Linear              2 * batch * in * out, where batch is all dimensions but the last
    Conv                2 * batch * positions of the output * channels out * channels in / groups * kernel
    ConvTranspose       the same with the positions of the input, because it is the backward of a convolution
    MultiheadAttention  Linear for q, k, v and the output, and 2 products of batch * heads * target * source * head,
                        whichever kernel computes them; recomputation inside a kernel's backward is not counted
    RNN, LSTM, GRU      per layer and direction 1, 4 or 3 gates: Linear of the input and of the state, at each time, and
                        of an LSTM's projection

The backward of a product takes as many operations as the product, for each of its two factors that needs a gradient.
"""

from __future__ import annotations

from collections import deque
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from hookd import of_tensor, originals_of, peek

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hookd import Module


class Cost(NamedTuple):
    """Operations of one call, and of its backward."""

    forward: int
    backward: int


class Input(NamedTuple):
    """A tensor that a module is called with."""

    shape: tuple[int, ...]
    requires_grad: bool

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @classmethod
    def of(cls, value: Any) -> Input | None:
        """Read a tensor; None if the value is not a tensor, is empty, or is a nested tensor without a single shape."""
        if not issubclass(type(value), torch.Tensor) or of_tensor(value, "is_nested"):
            return None
        shape = tuple(of_tensor(value, "shape"))
        return cls(shape, of_tensor(value, "requires_grad")) if prod(shape) else None


class Settings:
    """The constructor arguments of a module, read without running its code.

    Raises:
        LookupError: on reading an attribute that is missing, or is not plain (a property, for example).
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = peek(self._module, name, self)
        if value is self:
            raise LookupError(name)
        return value

    def trains(self, name: str) -> bool:
        """Whether a parameter gets gradients."""
        return any(of_tensor(tensor, "requires_grad") for tensor in originals_of(self._module, name))


def _product(flops: int, module: Settings, x: Input) -> Cost:
    return Cost(flops, flops * (x.requires_grad + module.trains("weight")))


def _linear(module: Settings, x: Input) -> Cost:
    return _product(2 * x.elements * module.out_features, module, x)


def _conv(module: Settings, x: Input) -> Cost:
    kernel, dilation, stride = module.kernel_size, module.dilation, module.stride
    spatial = x.shape[-len(kernel) :]
    positions = prod(
        (size + _padding(module, at) - dilation[at] * (kernel[at] - 1) - 1) // stride[at] + 1
        for at, size in enumerate(spatial)
    )
    batch = x.elements // (module.in_channels * prod(spatial))
    per_position = module.out_channels * module.in_channels // module.groups * prod(kernel)
    return _product(2 * batch * positions * per_position, module, x)


def _padding(module: Settings, at: int) -> int:
    """Return the padding of a dimension, both sides together.

    "same" keeps the size, and is only valid with stride 1.
    """
    padding = module.padding
    if padding == "valid":
        return 0
    if padding == "same":
        return int(module.dilation[at] * (module.kernel_size[at] - 1))
    return int(2 * padding[at])


def _conv_transpose(module: Settings, x: Input) -> Cost:
    return _product(2 * x.elements * module.out_channels // module.groups * prod(module.kernel_size), module, x)


def _attention(module: Settings, query: Input, key: Input, value: Input) -> Cost:
    sequence = 1 if module.batch_first and len(query.shape) == 3 else 0
    target, width = query.shape[sequence], module.embed_dim
    source = key.shape[sequence] + (module.bias_k is not None) + module.add_zero_attn
    batch = query.elements // (target * width)
    inputs = [2 * x.elements * width for x in (query, key, value)]
    output = 2 * query.elements * width
    scores = 2 * 2 * batch * target * source * width
    trains = module.trains("in_proj_weight") or module.trains("q_proj_weight")
    needs = trains or query.requires_grad or key.requires_grad or value.requires_grad
    backward = sum(flops * (x.requires_grad + trains) for flops, x in zip(inputs, (query, key, value), strict=False))
    backward += needs * (2 * scores + output) + Settings(module.out_proj).trains("weight") * output
    return Cost(sum(inputs) + scores + output, backward)


def _recurrent(module: Settings, x: Input) -> Cost:
    gates = {"LSTM": 4, "GRU": 3}.get(module.mode, 1) * module.hidden_size
    times = x.shape[1 if module.batch_first and len(x.shape) == 3 else 0]
    batch = x.elements // (times * module.input_size)
    state = module.proj_size or module.hidden_size
    directions = 2 if module.bidirectional else 1
    trains = module.trains("weight_ih_l0")
    forward = backward = 0
    for layer in range(module.num_layers):
        width = state * directions if layer else module.input_size
        of_input = directions * 2 * batch * times * width * gates
        of_state = directions * 2 * batch * state * gates
        projected = directions * 2 * batch * times * module.hidden_size * module.proj_size
        needs = layer > 0 or x.requires_grad
        forward += of_input + times * of_state + projected
        # The first state needs no gradient, so the backward of its product has one factor only.
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
"""Formulas by class, subclasses included, and the arguments of `forward` that they need."""


_BY_ID = {id(kind): formula for kind, formula in FORMULAS.items()}  # hashing a class may run metaclass code


def has_formula(module: nn.Module | None) -> bool:
    """Whether the operations of a module can be counted."""
    return any(id(kind) in _BY_ID for kind in type(module).__mro__)


def cost(module: nn.Module | None, inputs: tuple[Any, ...], kwargs: Mapping[str, object]) -> Cost | None:
    """Count the operations of one call.

    None if there is no formula, the inputs are not plain tensors (a packed sequence), or the settings not plain values.
    """
    found = next((_BY_ID[id(kind)] for kind in type(module).__mro__ if id(kind) in _BY_ID), None)
    # A lazy module does not know its widths before its first call.
    if module is None or found is None or issubclass(type(module), LazyModuleMixin):
        return None
    formula, names = found
    given = [Input.of(inputs[at] if at < len(inputs) else kwargs.get(name)) for at, name in enumerate(names)]
    if None in given:
        return None
    try:
        return formula(Settings(module), *given)
    except (LookupError, ZeroDivisionError):  # a stride of 0: the module is about to refuse the call
        return None


MOST_WAITING = 1024
"""Calls of one module that may wait: an evaluation has any number of calls, and none of them has a backward."""


class Call:
    """An outermost call of a sampled step, until its backward shows that it belongs to the training."""

    def __init__(self) -> None:
        self.flops = 0

    def take(self) -> int:
        """Return the forward operations that have not been taken yet."""
        taken, self.flops = self.flops, 0
        return taken


class Waiting:
    """The calls of layers in sampled steps that wait for their backward, with its operations."""

    def __init__(self) -> None:
        self._waiting: dict[int, deque[tuple[int, Call]]] = {}
        self._before: dict[int, deque[tuple[int, Call]]] = {}  # from the sampled step before

    def forward(self, module: Module, inputs: tuple[Any, ...], kwargs: Mapping[str, object], call: Call) -> None:
        """Count the operations of one call inside of `call`."""
        operations = cost(module.torch(), inputs, kwargs)
        if operations is None:
            return
        call.flops += operations.forward
        waiting = self._waiting.setdefault(module.id, deque(maxlen=MOST_WAITING))
        waiting.append((operations.backward, call))

    def backward(self, module: Module) -> int:
        """Return the operations that are certain now; the backward of the last call comes first."""
        waiting = self._waiting.get(module.id) or self._before.get(module.id)
        if not waiting:
            return 0
        flops, call = waiting.pop()
        return call.take() + flops

    def step_done(self) -> None:
        """Forget the calls whose backward has not come since the step before: those of an evaluation have none.

        Calls of this step are kept: with two optimizers, one model runs its backward after the other's step.
        """
        self._before, self._waiting = self._waiting, {}
