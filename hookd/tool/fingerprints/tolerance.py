"""How different two tensors may be that count as equal."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_DIGITS = {
    "float64": 52, "complex128": 52, "float32": 23, "complex64": 23, "float16": 10, "complex32": 10, "bfloat16": 7,
    "float8_e4m3fn": 3, "float8_e4m3fnuz": 3, "float8_e5m2": 2, "float8_e5m2fnuz": 2,
}  # fmt: skip
"""Binary digits after the point of a normal number, by dtype (IEEE 754; torch.finfo(dtype).eps is 2**-digits)."""
_WRITTEN = re.compile(
    r"(?P<number>(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*(?:(?P<unit>ulps?)(?::(?P<dtype>\w+))?)?", re.ASCII
)


@dataclass(frozen=True)
class Tolerance:
    """The largest difference of norm, least and greatest element; without one, bits are compared.

    Attributes:
        relative: as a share of the larger norm, or of the largest magnitude.
        ulps: in units in the last place of the dtype, of two dtypes the coarser one. Tensors whose elements differ by so many
            at most have norms that do.
    """

    relative: float = 0.0
    ulps: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Tolerance:
        """Read `1e-3`, `4ulp`, or `4ulp:bfloat16`, a share that counts for tensors of all dtypes.

        Raises:
            ValueError: it is none of them, or all tensors would count as equal; the message is for a person.
        """
        found = _WRITTEN.fullmatch(text.strip().lower())
        number = float(found["number"]) if found else math.inf
        if found is None or not math.isfinite(number):
            raise ValueError("write a number, such as 1e-3, or 4ulp, or 4ulp:bfloat16")
        dtype = found["dtype"]
        if dtype is not None and dtype not in _DIGITS:
            raise ValueError(f"choose a dtype from {', '.join(_DIGITS)}")
        if found["unit"] and dtype is None:
            return cls(ulps=number)
        relative = number if dtype is None else number * 2.0 ** -_DIGITS[dtype]
        if relative >= 1:
            raise ValueError(
                "a share must be less than 1, since all norms differ by less; write 4ulp for units in the last place"
            )
        return cls(relative)

    def __bool__(self) -> bool:
        """Whether anything but equal bits counts as equal."""
        return bool(self.relative or self.ulps)

    def __str__(self) -> str:
        """Return it as it is written."""
        return f"{self.ulps:g} ulp" if self.ulps else f"{self.relative:g}"

    def advice(self, dtypes: Iterable[tuple[str, str]]) -> str:
        """Return what to do if tensors of one dtype differ that are computed from those of two; "" for nothing."""
        coarser = [
            min(pair, key=_DIGITS.__getitem__) for pair in dtypes if pair[0] != pair[1] and {*pair} <= {*_DIGITS}
        ]
        if not self.ulps or not coarser:
            return ""
        name = min(coarser, key=_DIGITS.__getitem__)
        return (
            f"The runs compute some tensors in other dtypes; what is computed from these differs as much as they do, whatever its dtype: "
            f"compare with --tolerance {self.ulps:g}ulp:{name}."
        )

    def of(self, *dtypes: str) -> float:
        """Return the largest relative difference of two tensors of these dtypes; 0 for integers, which have equal bits or differ."""
        digits = [_DIGITS[dtype] for dtype in dtypes if dtype in _DIGITS]
        return max(self.relative, self.ulps * 2.0 ** -min(digits)) if len(digits) == len(dtypes) else 0.0
