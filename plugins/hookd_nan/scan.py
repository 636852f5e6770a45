"""Looking for NaN and infinity: at once on the host, on a device by numbers that are read later. Runs in the target."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any, Union

import torch
from torch import Tensor

from hookd import Context

if TYPE_CHECKING:
    from collections.abc import Iterable

Range = tuple[Tensor, Tensor]  # minimum and maximum, 0-dim
Found = Union[str, list[Range]]  # "" (nothing bad), "inf" or "nan"; on a device the ranges, to be read later
INF = math.inf
_norms: Any = getattr(torch, "_foreach_norm", None)  # torch 1.13+
_PLAIN = frozenset((Tensor, torch.nn.Parameter))
_SUMMED = frozenset((torch.bfloat16, torch.float32, torch.float64))  # a sum of squares of float16 overflows too easily


def on_host(tensor: Tensor) -> bool:
    """Say whether reading a value of `tensor` costs nothing."""
    return tensor.is_cpu


class Scan:
    """Looks at tensors of any kind. `-inf` alone is no finding where masks are expected, unless `neginf`.

    Attributes:
        largest: the largest norm of those that `many` has looked at last, None where it is not known.
    """

    def __init__(self, context: Context, *, neginf: bool) -> None:
        self._context, self.neginf = context, neginf
        self.largest: float | None = None

    def __call__(self, found: Iterable[Tensor], *, masks: bool = False) -> Found:
        """Look at each tensor. `masks`: `-inf` alone is none of our business."""
        worst, ranges = "", []
        masks = masks and not self.neginf
        for tensor in found:
            if on_host(tensor):
                if not self._context.is_finite(tensor, masks=masks):
                    worst = max(worst, self._kind(tensor))
            else:
                ends = self._context.extremes(tensor)
                if ends is not None:
                    ranges.append(ends)
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
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).replace("torch.", ""),
        }

    def many(self, found: list[Tensor]) -> Found:
        """Look at many tensors that are mostly good, such as all gradients: one call for all of a kind.

        Their norms are finite if they are. A norm that is not may have overflowed: then each tensor is looked at. On a
        device nobody can look again later, so there it is the norm that does not overflow, the largest absolute value.
        """
        self.largest = None
        groups, rest = _groups(found)
        ranges: list[Range] = []
        for group in groups:
            is_here = on_host(group[0])
            worst = torch.stack(_norms(group, 2 if is_here else INF)).max()
            if not is_here:
                ranges.append((worst, worst))
                continue
            self.largest = max(worst.item(), self.largest or 0.0)
            if not self.largest < INF:
                return self(found)
        kind = self(rest)
        return kind if isinstance(kind, str) and kind else [*ranges, *kind] if ranges else kind


def kind_of(low: float, high: float, *, masks: bool = False) -> str:
    """Judge a range of which both ends are NaN if there is one: "nan", "inf" or ""."""
    if high < INF and (low > -INF or masks):
        return ""
    return "nan" if math.isnan(high) else "inf"


def is_bad(found: Found) -> bool:
    """Say whether anything is bad; waits for a device."""
    if isinstance(found, str):
        return bool(found)
    return any(kind_of(low.item(), high.item()) for low, high in found)


def own_tensors(module: torch.nn.Module | None) -> dict[str, Tensor]:
    """Give the parameters and buffers that `module` itself owns."""
    if module is None:
        return {}
    return {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}


def _groups(found: list[Tensor]) -> tuple[list[list[Tensor]], list[Tensor]]:
    groups: dict[Any, list[Tensor]] = {}
    rest = []
    for tensor in found:
        if _norms is not None and _has_norm(tensor):
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        else:
            rest.append(tensor)
    return list(groups.values()), rest


def _has_norm(tensor: Tensor) -> bool:
    """Whether it is what nearly all gradients are: strided, of a common floating-point type, and of no subclass."""
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_meta:
        return False
    if on_host(tensor):
        return tensor.dtype in _SUMMED
    return tensor.numel() > 0 and tensor.is_floating_point()  # nothing has no largest value


class Seen:
    """The output that was found good last: a container mostly returns the very tensor that its last module did.

    Attributes:
        ref: gives it, while it lives.
        version: which one of it that was; an operation in place makes another.
    """

    def __init__(self) -> None:
        self.ref: Any = lambda: None
        self.version = 0

    def note(self, tensor: Tensor) -> None:
        """Remember a good one; weakly, and only where a change of it would show."""
        if not tensor.is_inference():
            self.ref, self.version = weakref.ref(tensor), tensor._version  # noqa: SLF001
