"""How different two tensors may be that count as equal."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_DIGITS = {
    "float64": 52, "complex128": 52, "float32": 23, "complex64": 23, "float16": 10, "complex32": 10, "bfloat16": 7,
    "float8_e4m3fn": 3, "float8_e4m3fnuz": 3, "float8_e5m2": 2, "float8_e5m2fnuz": 2,
}  # fmt: skip
"""Binary digits after the point of a normal number, by dtype (IEEE 754; torch.finfo(dtype).eps is 2**-digits)."""
_WRITTEN = re.compile(r"(?P<number>[^a-z]*(?:e[+-]?\d+)?)\s*(?:(?P<unit>ulps?)(?::(?P<dtype>\w+))?)?")


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
            ValueError: it is none of them.
        """
        found = _WRITTEN.fullmatch(text.strip().lower())
        number = float(found["number"]) if found else math.nan
        if found is None or not math.isfinite(number) or number < 0:
            raise ValueError(f"not a tolerance: {text}")
        if (dtype := found["dtype"]) is not None:
            if dtype not in _DIGITS:
                raise ValueError(f"not a tolerance: {text}, choose a dtype from {', '.join(_DIGITS)}")
            return cls(number * 2.0 ** -_DIGITS[dtype])
        return cls(ulps=number) if found["unit"] else cls(number)

    def __bool__(self) -> bool:
        """Whether anything but equal bits counts as equal."""
        return bool(self.relative or self.ulps)

    def __str__(self) -> str:
        """Return it as it is written."""
        return f"{self.ulps:g} ulp" if self.ulps else f"{self.relative:g}"

    def of(self, *dtypes: str) -> float:
        """Return the largest relative difference of two tensors of these dtypes; 0 for integers, which have equal bits or differ."""
        digits = [_DIGITS[dtype] for dtype in dtypes if dtype in _DIGITS]
        return max(self.relative, self.ulps * 2.0 ** -min(digits)) if len(digits) == len(dtypes) else 0.0
