"""Looking for NaN and infinity: at once on the host, on a device by flags that are read later. Runs in the target."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Union

import torch
from torch import Tensor

from hookd_nan import tensors
from hookd_nan.tensors import INF, dense, is_plain, kind_of, plain

if TYPE_CHECKING:
    from collections.abc import Iterable

Range = tuple[Tensor, Tensor]  # minimum and maximum, 0-dim
Found = Union[str, list[Range]]  # "" (nothing bad), "inf" or "nan"; on a device the ranges, to be read later
_norms: Any = getattr(torch, "_foreach_norm", None)  # torch 1.13+
_SUMMED = frozenset((torch.bfloat16, torch.float32, torch.float64))  # a sum of squares of float16 overflows too easily


class Scan:
    """Looks at tensors. `-inf` alone is no finding where masks are expected, unless `neginf`."""

    def __init__(self, *, neginf: bool) -> None:
        self._neginf = neginf

    def __call__(self, found: Iterable[Tensor], *, masks: bool = False) -> Found:
        """Look in one pass over each tensor: NaN reaches both ends of aminmax.

        Unlike a sum, the range of finite numbers cannot overflow, so it raises no false alarm. `masks`: `-inf` alone
        is none of our business.
        """
        worst, ranges = "", []
        masks = masks and not self._neginf
        for tensor in found:
            real = plain(tensor)
            if real is not None:
                low, high = torch.aminmax(dense(real))
                if tensors.on_host(real):
                    worst = max(worst, kind_of(low.item(), high.item(), masks=masks))
                else:
                    ranges.append((high if masks else low, high))
        return worst or ranges or ""

    def many(self, found: list[Tensor]) -> Found:
        """Look at many tensors that are mostly good, such as all gradients: one call for all of a kind.

        Their norms are finite if they are. A norm that is not may have overflowed: then each tensor is looked at. On a
        device nobody can look again later, so there it is the norm that does not overflow, the largest absolute value.
        """
        groups, rest = _groups(found)
        ranges: list[Range] = []
        for group in groups:
            is_here = tensors.on_host(group[0])
            worst = torch.stack(_norms(group, 2 if is_here else INF)).max()
            if not is_here:
                ranges.append((worst, worst))
            elif not worst.item() < INF:
                return self(found)
        kind = self(rest)
        return kind if isinstance(kind, str) and kind else [*ranges, *kind] if ranges else kind


def _groups(found: list[Tensor]) -> tuple[list[list[Tensor]], list[Tensor]]:
    groups: dict[Any, list[Tensor]] = {}
    rest = []
    for tensor in found:
        if _norms is not None and is_plain(tensor) and not tensor.is_meta and _has_norm(tensor):
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        else:
            rest.append(tensor)
    return list(groups.values()), rest


def _has_norm(tensor: Tensor) -> bool:
    if not tensors.on_host(tensor):
        return tensor.numel() > 0  # nothing has no largest value
    return tensor.dtype in _SUMMED


class Seen:
    """The tensor that was found good last: a container mostly returns the very tensor that its last module did."""

    def __init__(self) -> None:
        self._ref: Any = lambda: None
        self._version = 0

    def __contains__(self, value: Any) -> bool:
        return value is self._ref() and value is not None and value._version == self._version  # noqa: SLF001

    def note(self, value: Any) -> None:
        """Remember a good output; weakly, and only where a change of it would show."""
        if type(value) is Tensor and not value.is_inference():
            self._ref, self._version = weakref.ref(value), value._version  # noqa: SLF001
