"""Looking for NaN and infinity: at once on the host, on a device by numbers that are read later. Runs in the target."""

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


class Range(NamedTuple):
    """The range of a tensor, to be read later.

    Attributes:
        low: the minimum, of 0 dimensions, and `high` the maximum; both are NaN if there is one.
        at: its place among the tensors that were looked at.
    """

    low: Tensor
    high: Tensor
    at: int


# "" (nothing bad), "inf" or "nan"; on a device the ranges, or the largest magnitudes, to be read later.
Found = Union[str, list[Union[Range, Largest]]]
INF = math.inf
_grad: Any = Tensor.grad.__get__  # type: ignore[union-attr]  # past what a class of parameters has in its place


def on_host(tensor: Tensor) -> bool:
    """Say whether reading a value of `tensor` costs nothing."""
    return bool(of_tensor(tensor, "is_cpu"))


class Scan:
    """Looks at tensors of any kind. `-inf` alone is no finding where masks are expected, unless `neginf`.

    Attributes:
        is_strict: an optimizer has used gradients that nobody has looked at, so -inf in what is trained may be made of them.
        largest: the largest magnitude in those that `many` has looked at last, None where it is not known.
    """

    def __init__(self, context: Context, *, neginf: bool) -> None:
        self._context, self.neginf = context, neginf
        self.largest: float | None = None
        self.is_strict = False

    def trained(self, found: Iterable[Tensor]) -> str:
        """Look at parameters in the host's memory for what unseen gradients may have made of them."""
        asked = [one for one in found if on_host(one) and of_tensor(one, "requires_grad")] if self.is_strict else []
        return str(self(asked)) if asked else ""

    def __call__(self, found: Iterable[Tensor], *, masks: bool = False) -> Found:
        """Look at each tensor. `masks`: `-inf` alone is none of our business."""
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

    def counts(self, tensor: Tensor) -> dict[str, Any]:
        """Count exactly; only ever called for the one tensor of an incident."""
        summary = self._context.summary(tensor)
        if summary is None:
            return {}
        return {
            "nan_count": summary.nans,
            "inf_count": summary.infs,
            "elements": summary.count,
            "shape": None
            if of_tensor(tensor, "is_nested")
            else list(of_tensor(tensor, "shape")),  # a nested one has several, or raises
            "dtype": str(of_tensor(tensor, "dtype")).replace("torch.", ""),
        }

    def gradients(self, optimizer: Optimizer) -> Found:
        """Look at the gradients that an optimizer would use, in its order."""
        self.largest = self._context.largest_gradient(optimizer)
        if self.largest is not None and self.largest < INF:
            return ""
        grads = (_grad(one) for group in groups_of(optimizer) for one in group["params"])
        return self.many([one for one in grads if one is not None])

    def many(self, found: list[Tensor]) -> Found:
        """Look at many tensors that are mostly good, such as all gradients: as one, and one by one if that is bad."""
        self.largest = None
        away: list[Range | Largest] = []
        for largest in self._context.largest_each(found):
            if isinstance(largest.value, float):
                self.largest = largest.value
                if not largest.value < INF:
                    return self(found)
            else:
                away.append(largest)
        return away or ""


def kind_of(low: float, high: float, *, masks: bool = False) -> str:
    """Judge a range of which both ends are NaN if there is one: "nan", "inf" or ""."""
    if high < INF and (low > -INF or masks):
        return ""
    return "nan" if math.isnan(high) else "inf"


def is_within(name: str, container: str) -> bool:
    """Say whether the module of this name is contained in another one."""
    if container.endswith("(root)"):
        return (
            name != container and name.startswith(container[:-6]) and name.startswith("#") == container.startswith("#")
        )
    return name.startswith(f"{container}.")


def is_bad(found: Found) -> bool:
    """Say whether anything is bad; waits for a device."""
    if isinstance(found, str):
        return bool(found)
    return any(kind_of(*map(_number, ends_of(one))) for one in found)


def ends_of(one: Range | Largest) -> tuple[Any, Any]:
    """Give the ends of what was found on a device; of many tensors the largest magnitude is both."""
    return (one.low, one.high) if isinstance(one, Range) else (one.value, one.value)


def _number(value: Tensor) -> float:
    return value.max().item()


def is_scaled(node: Any) -> bool:
    """Say whether a loss looks like one that a GradScaler has scaled: a product, or a sum of such ones."""
    name = type(node).__name__
    if name == "AddBackward0":
        return all(is_scaled(one) for one, _ in node.next_functions)
    return name == "MulBackward0"


def own_tensors(module: torch.nn.Module | None) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """Give the parameters and the buffers that `module` itself owns.

    Of a normalization in training no buffers: it has written them in this very call, and its output is made without them
    (torch/nn/modules/batchnorm.py `_NormBase`, torch/nn/functional.py `batch_norm`, 2.0 to 2.14).
    """
    if module is None:
        return {}, {}
    is_calm = not (peek(module, "training") and issubclass(type(module), _NormBase))
    return parameters_of(module), buffers_of(module) if is_calm else {}


def nothing() -> None:
    """Stand in for a reference to an output that is gone, or that is no single tensor."""


class Seen:
    """The output that was found good last: a container mostly returns the very tensor that its last module did."""

    def __init__(self) -> None:
        self._ref: Any = nothing
        self._version = 0

    def note(self, call: Call) -> None:
        """Remember a good one; weakly, and only where a change of it would show."""
        self._version = call.version
        self._ref = nothing if call.version < 0 else tensor_ref(call.output)

    def forget(self) -> None:
        """Let go of it: the outermost call is over."""
        self._ref = nothing

    def last(self) -> tuple[Tensor | None, int]:
        """Give it, if it is still there, and which one of it that was."""
        return self._ref(), self._version
