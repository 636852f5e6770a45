"""Check tensors for NaN and infinity: at once in host memory, on a device by values that are read later."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, Union

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from hookd import Context, Largest, buffers_of, groups_of, of_tensor, parameters_of, peek, tensor_ref

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch.optim import Optimizer

    from hookd import Call
    from hookd_nan.judge import Details


class Range(NamedTuple):
    """The range of a tensor, to be read later.

    Attributes:
        low: the minimum, a tensor of 0 dimensions; NaN if the tensor has one.
        high: the maximum, likewise.
        at: position among the tensors that were checked.
    """

    low: Tensor
    high: Tensor
    at: int


# "" (good), "inf" or "nan"; on a device the ranges or largest magnitudes, to be read later.
Found = Union[str, list[Union[Range, Largest]]]
INF = math.inf
_grad: Any = Tensor.grad.__get__  # type: ignore[union-attr]  # bypasses a `grad` that a class of parameters defines


def on_host(tensor: Tensor) -> bool:
    """Whether reading a value of `tensor` costs nothing."""
    return bool(of_tensor(tensor, "is_cpu"))


class Scan:
    """Checks tensors of any kind; `-inf` alone is good where masks are expected, unless `neginf`.

    Attributes:
        is_strict: an optimizer has used unchecked gradients, so -inf in a parameter may come from them.
        largest: the largest magnitude in the last tensors given to `many`, None if unknown.
    """

    def __init__(self, context: Context, *, neginf: bool) -> None:
        self._context, self.neginf = context, neginf
        self.largest: float | None = None
        self.is_strict = False

    def succeed(self, predecessor: Scan) -> None:
        """Take over from a predecessor whether unchecked gradients were used."""
        self.is_strict = predecessor.is_strict

    def trained(self, found: Iterable[Tensor]) -> str:
        """Check parameters in host memory, `-inf` included, if unchecked gradients may have made them bad."""
        checked = [one for one in found if on_host(one) and of_tensor(one, "requires_grad")] if self.is_strict else []
        return str(self(checked)) if checked else ""

    def __call__(self, found: Iterable[Tensor], *, masks: bool = False) -> Found:
        """Check each tensor; with `masks`, `-inf` alone is good unless `neginf`."""
        worst = ""
        ranges: list[Range | Largest] = []
        masks = masks and not self.neginf
        for at, tensor in enumerate(found):
            if on_host(tensor):
                if not self._context.is_finite(tensor, masks=masks):
                    worst = max(worst, self._kind(tensor))
            else:
                ends = self._context.extremes(tensor)
                if ends is not None:
                    ranges.append(Range(*ends, at))
        return worst or ranges or ""

    def _kind(self, tensor: Tensor) -> str:
        summary = self._context.summary(tensor)
        return "nan" if summary is not None and summary.nans else "inf"

    def counts(self, tensor: Tensor) -> Details:
        """Return exact counts, for the one tensor of an incident."""
        summary = self._context.summary(tensor)
        if summary is None:
            return {}
        return {
            "nan_count": summary.nans,
            "inf_count": summary.infs,
            "elements": summary.count,
            "shape": None
            if of_tensor(tensor, "is_nested")
            else list(of_tensor(tensor, "shape")),  # a nested tensor has several, or raises
            "dtype": str(of_tensor(tensor, "dtype")).replace("torch.", ""),
        }

    def details(self, candidates: Mapping[Any, Tensor], kind: str) -> Details:
        """Return the counts of the first tensor with a bad value of this kind, and its name if it has one."""
        for name, tensor in candidates.items():
            if (self([tensor], masks=True) or self.trained([tensor])) == kind:
                counts = self.counts(tensor)
                return {"parameter": name, **counts} if isinstance(name, str) else counts
        return {}

    def gradients(self, optimizer: Optimizer) -> Found:
        """Check the gradients that an optimizer would use, in its order."""
        self.largest = self._context.largest_gradient(optimizer)
        if self.largest is not None and self.largest < INF:
            return ""
        grads = (_grad(one) for group in groups_of(optimizer) for one in group["params"])
        return self.many([one for one in grads if one is not None])

    def many(self, found: list[Tensor]) -> Found:
        """Check many tensors that are mostly good, such as gradients: all at once, and one by one if that is bad."""
        self.largest = None
        on_device: list[Range | Largest] = []
        for largest in self._context.largest_each(found):
            if isinstance(largest.value, float):
                self.largest = largest.value
                if not largest.value < INF:
                    return self(found)
            else:
                on_device.append(largest)
        return on_device or ""


def kind_of(low: float, high: float, *, masks: bool = False) -> str:
    """Return the kind of a range, "nan", "inf" or ""; both ends are NaN if the tensor has one."""
    if high < INF and (low > -INF or masks):
        return ""
    return "nan" if math.isnan(high) else "inf"


def is_within(name: str, container: str) -> bool:
    """Whether one module is inside another, by their names."""
    if container.endswith("(root)"):
        return (
            name != container and name.startswith(container[:-6]) and name.startswith("#") == container.startswith("#")
        )
    return name.startswith(f"{container}.")


def is_bad(found: Found) -> bool:
    """Whether anything is bad; waits for a device."""
    if isinstance(found, str):
        return bool(found)
    return any(kind_of(*map(_number, ends_of(one))) for one in found)


def ends_of(one: Range | Largest) -> tuple[Any, Any]:
    """Return the ends of a result on a device; for many tensors, the largest magnitude is both."""
    return (one.low, one.high) if isinstance(one, Range) else (one.value, one.value)


def _number(value: Tensor) -> float:
    return value.max().item()


def is_scaled(node: Any) -> bool:
    """Whether a loss looks like one that a GradScaler has scaled: a product, or a sum of products."""
    name = type(node).__name__
    if name == "AddBackward0":
        return all(is_scaled(one) for one, _ in node.next_functions)
    return name == "MulBackward0"


def own_tensors(module: torch.nn.Module | None) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """Return the parameters and the buffers that `module` itself owns.

    For a normalization in training there are no buffers: the call has just written them, and the output does not depend
    on them (torch/nn/modules/batchnorm.py `_NormBase`, torch/nn/functional.py `batch_norm`, 2.0 to 2.14).
    """
    if module is None:
        return {}, {}
    uses_buffers = not (peek(module, "training") and issubclass(type(module), _NormBase))
    return parameters_of(module), buffers_of(module) if uses_buffers else {}


def nothing() -> None:
    """Stand in for a reference to an output that is gone, or is not a single tensor."""


class Seen:
    """The output that was last found good: a container mostly returns the same tensor as its last module."""

    def __init__(self) -> None:
        self._ref: Any = nothing
        self._version = 0

    def note(self, call: Call) -> None:
        """Remember a good output by a weak reference, if it has a version counter that shows changes."""
        self._version = call.version
        self._ref = nothing if call.version < 0 else tensor_ref(call.output)

    def forget(self) -> None:
        """Forget the output at the end of the outermost call."""
        self._ref = nothing

    def last(self) -> tuple[Tensor | None, int]:
        """Return the output, None if it is gone, and its version counter when it was found good."""
        return self._ref(), self._version
