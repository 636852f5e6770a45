"""Find losses that get something else than they expect, by the operations in their graph."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from hookd import of_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

NODES = 64
"""Nodes of a graph that are examined, those nearest to the loss."""
AT_FIRST, LATER = 8, 8
"""The first AT_FIRST sampled steps are examined, then one in LATER."""
RESHAPED = frozenset(
    f"{name}Backward"
    for name in (
        "Clone", "Index", "Permute", "ReshapeAlias", "Select", "Slice", "Squeeze", "T", "ToCopy", "Transpose", "UnsafeView",
        "Unsqueeze", "View",
    )
)  # fmt: skip
"""Operations after which numbers are the same, in another shape or type."""
DELIBERATE = frozenset(
    ("AccumulateGrad", "IndexBackward", "PermuteBackward", "SelectBackward", "TransposeBackward", "UnsqueezeBackward")
)
"""Parameters, and operations that somebody writes who wants each number to meet each."""
MEANS = RESHAPED | {"MeanBackward", "SumBackward", "DivBackward"}
CUT = frozenset(("ClampBackward", "ClampMinBackward", "MaximumBackward", "ReluBackward"))
"""Operations whose gradient is 0 where their output is cut off."""
LIKELIHOODS = ("NllLossBackward", "NllLoss2DBackward")
LOGITS = "Pass the logits"
SOFTMAX_TWICE = f"cross_entropy applies a softmax, but gets the output of a softmax. {LOGITS}"
OF_CROSS_ENTROPY = {
    "SigmoidBackward": f"cross_entropy applies a softmax, but gets the output of a sigmoid. {LOGITS}",
    "ReluBackward": f"cross_entropy gets the output of a ReLU, which has no negative numbers. {LOGITS}",
}
OF_BINARY = {
    "SigmoidBackward": f"binary_cross_entropy_with_logits applies a sigmoid, but gets the output of a sigmoid. {LOGITS}",
    "SoftmaxBackward": f"binary_cross_entropy_with_logits applies a sigmoid, but gets the output of a softmax. {LOGITS}",
    "ReluBackward": f"binary_cross_entropy_with_logits gets the output of a ReLU, which has no negative numbers. {LOGITS}",
}
NO_LOGARITHM = {
    "SoftmaxBackward": "a softmax", "SigmoidBackward": "a sigmoid", "AddmmBackward": "a Linear", "MmBackward": "a Linear",
    "ConvolutionBackward": "a convolution",
}  # fmt: skip
"""By the operation whose output a loss gets: what is wrong with that."""
ONE_CLASS = (
    "the softmax of the loss is over a dimension of size 1, so each probability is 1, whatever the model returns. "
    "For two classes with one output use binary_cross_entropy_with_logits"
)


class Losses:
    """Looks at the graphs of the losses of a step.

    Args:
        see: takes a sample of a finding: kind, what it is about, message.
    """

    def __init__(self, see: Callable[..., None]) -> None:
        self._see = see
        self._looks = 0
        self._found: set[str] = set()  # in this step
        self._known: set[str] = set()  # in all steps

    def backward_begins(self, tensors: Iterable[Any]) -> None:
        """Look at the graph of each loss."""
        if self._looks < AT_FIRST or self._looks % LATER == 0:
            for tensor in tensors:
                self._found.update(mistakes(of_tensor(tensor, "grad_fn")))

    def step_over(self) -> None:
        """Judge the losses of this step."""
        if self._looks < AT_FIRST or self._looks % LATER == 0:
            self._known |= self._found
            for message in self._known:
                self._see("loss_input", message, message if message in self._found else "")
        self._found = set()
        self._looks += 1


def is_satisfied(loss: Any) -> bool:
    """Whether a loss is 0 because nothing is left to learn: a hinge or a triplet loss that is cut off at 0."""
    node = of_tensor(loss, "grad_fn")
    while _is_known(node) and _name(node) in MEANS:
        node = node.next_functions[0][0]
    return _is_known(node) and _name(node) in CUT


def mistakes(root: Any) -> Iterator[str]:
    """Yield what is wrong with the inputs of a loss, given the node that computed it."""
    due, seen = [root], {root}
    for node in due:  # breadth first: `due` grows
        if not _is_known(node):
            continue
        for following, at in node.next_functions:
            if _is_known(following):
                yield from _of_types(_name(node), _source(following))
                yield from _of_shapes(node, following, at)
            if following not in seen and len(due) < NODES:
                seen.add(following)
                due.append(following)


def _of_types(name: str, source: Any) -> Iterator[str]:
    """Yield what is wrong with an operation that gets the output of another one."""
    kind = _name(source)
    if name == "LogSoftmaxBackward" and kind == "SoftmaxBackward":
        yield SOFTMAX_TWICE
    elif name == "BinaryCrossEntropyWithLogitsBackward" and kind in OF_BINARY:
        yield OF_BINARY[kind]
    elif name in LIKELIHOODS and kind in NO_LOGARITHM:
        yield (
            f"nll_loss expects logarithms of probabilities, but gets the output of {NO_LOGARITHM[kind]}. Use cross_entropy, with the "
            "logits"
        )
    elif name in LIKELIHOODS and kind == "LogSoftmaxBackward":
        if _is_over_one(source):
            yield ONE_CLASS
        before = _name(_source(source.next_functions[0][0]))
        if before in OF_CROSS_ENTROPY:
            yield OF_CROSS_ENTROPY[before]


def _is_known(node: Any) -> bool:
    """Whether a node is one of torch's own; those of a `torch.autograd.Function` may run the training's code."""
    return node is not None and not issubclass(type(node), torch._C._FunctionBase)  # noqa: SLF001


def _name(node: Any) -> str:
    """Return the name of an operation without its number: `SqueezeBackward`."""
    return type(node).__name__.rstrip("0123456789")


def _source(node: Any) -> Any:
    """Return the node of the operation that made the numbers: the first one that does not only reshape them."""
    while _is_known(node) and _name(node) in RESHAPED:
        node = node.next_functions[0][0]
    return node


def _is_over_one(node: Any) -> bool:
    """Whether a softmax is over a dimension of size 1."""
    shape, dimension = _shape(node, 0), getattr(node, "_saved_dim", None)
    if not shape or type(dimension) is not int:
        return False
    dimension = dimension - 2**64 if dimension >= 2**63 else dimension  # it is shown without its sign
    return -len(shape) <= dimension < len(shape) and shape[dimension] == 1 and math.prod(shape) > 1


def _of_shapes(node: Any, following: Any, at: int) -> Iterator[str]:
    """Yield a message if a column of outputs meets a row of targets, so that all pairs of them are compared."""
    if _name(node) not in ("SubBackward", "ExpandBackward") or _name(following) in DELIBERATE:
        return
    wide, narrow = _shape(node, 0), _shape(following, at)
    if len(wide) < 2 or wide[0] != wide[1] or wide[0] == 1 or narrow not in ((wide[0], 1, *wide[2:]), wide[1:]):  # noqa: PLR2004
        return
    if any(other is not following and other is not None for other, _ in node.next_functions):
        return  # both sides come from the model: pairs are what it wants
    other = wide[1:] if len(narrow) == len(wide) else (wide[0], 1, *wide[2:])
    yield (
        f"outputs of shape {_shown(narrow)} meet targets of shape {_shown(other)} in the loss, so that each output is compared with every "
        "target. Give both the same shape, with squeeze() or unsqueeze()"
    )


def _shape(node: Any, at: int) -> tuple[int, ...]:
    """Return the shape of an output of an operation; () if torch does not show it. Source: python_cpp_function.cpp, torch 2.1."""
    shown = getattr(node, "_input_metadata", ())
    return tuple(shown[at].shape) if at < len(shown) else ()


def _shown(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
