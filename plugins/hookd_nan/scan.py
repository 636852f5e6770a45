"""Check tensors for NaN and infinity: at once in host memory, on a device by values that are read later."""

from __future__ import annotations

import math
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Union

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from hookd import Context, buffers_of, of_tensor, parameters_of, peek
from hookd_nan.optimizers import gradients_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch.optim import Optimizer

    from hookd_nan.judge import Details


class Ends(NamedTuple):
    """The smallest and largest elements of tensors on a device, to be read later; both are NaN if a tensor has one.

    Attributes:
        values: of one tensor the smallest and the largest element; of several, one tensor with the largest magnitude of each.
        at: positions of these tensors among those that were checked.
    """

    values: tuple[Tensor, ...]
    at: Sequence[int]

    def read(self, numbers: Iterator[float | None]) -> Iterator[tuple[int, float | None, float | None]]:
        """Yield the position, the smallest and the largest element of each tensor, given an iterator of the values' numbers."""
        own, count = list(islice(numbers, sum(value.numel() for value in self.values))), len(self.at)
        return zip(self.at, own[:count], own[-count:])


# "" (good), "inf" or "nan"; on a device what is to be read later.
Result = Union[str, list[Ends]]
INF = math.inf


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

    def own(self, tensors: Iterable[Tensor]) -> Result:
        """Check parameters or buffers; `-inf` alone is good, unless unchecked gradients may have made it."""
        tensors = list(tensors)
        return self(tensors, masks=True) or self.trained(tensors)

    def trained(self, tensors: Iterable[Tensor]) -> str:
        """Check parameters in host memory, `-inf` included, if unchecked gradients may have made them bad."""
        checked = (
            [tensor for tensor in tensors if on_host(tensor) and of_tensor(tensor, "requires_grad")]
            if self.is_strict
            else []
        )
        return str(self(checked)) if checked else ""

    def __call__(self, tensors: Iterable[Tensor], *, masks: bool = False) -> Result:
        """Check each tensor; with `masks`, `-inf` alone is good unless `neginf`."""
        worst = ""
        on_device: list[Ends] = []
        masks = masks and not self.neginf
        for at, tensor in enumerate(tensors):
            if not on_host(tensor):
                ends = self._context.extremes(tensor)
                on_device += [] if ends is None else [Ends(ends, (at,))]
            elif not self._context.is_finite(tensor, masks=masks):
                worst = max(worst, self._kind(tensor))
        return worst or on_device or ""

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
            "shape": None if of_tensor(tensor, "is_nested") else list(of_tensor(tensor, "shape")),
            "dtype": str(of_tensor(tensor, "dtype")).replace("torch.", ""),
        }

    def details(self, candidates: Mapping[Any, Tensor], kind: str) -> Details:
        """Return the counts of the first tensor with a bad value of this kind, and its name if it has one."""
        for name, tensor in candidates.items():
            if self.own([tensor]) == kind:
                counts = self.counts(tensor)
                return {"parameter": name, **counts} if isinstance(name, str) else counts
        return {}

    def gradients(self, optimizer: Optimizer) -> Result:
        """Check the gradients that an optimizer would use, in its order."""
        self.largest = self._context.largest_gradient(optimizer)
        if self.largest is not None and self.largest < INF:
            return ""
        return self.many(list(gradients_of(optimizer).values()))

    def many(self, tensors: list[Tensor]) -> Result:
        """Check many tensors that are mostly good, such as gradients: all at once, and one by one if that is bad."""
        self.largest = None
        on_device: list[Ends] = []
        for largest in self._context.largest_each(tensors):
            if isinstance(largest.value, float):
                self.largest = largest.value
                if not largest.value < INF:
                    return self(tensors)
            else:
                on_device.append(Ends((largest.value,), largest.at))
        return on_device or ""


def kind_of(low: float, high: float, *, masks: bool = False) -> str:
    """Return the kind of a range, "nan", "inf" or ""; both ends are NaN if the tensor has one."""
    if high < INF and (low > -INF or masks):
        return ""
    return "nan" if math.isnan(high) else "inf"


def is_bad(result: Result) -> bool:
    """Whether anything is bad; waits for a device."""
    if isinstance(result, str):
        return bool(result)
    return any(kind_of(ends.values[0].max().item(), ends.values[-1].max().item()) for ends in result)


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
