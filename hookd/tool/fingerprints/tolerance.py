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
_WRITTEN = re.compile(r"(?P<number>[^a-z]*(?:e[+-]?\d+)?)\s*(?P<unit>ulps?)?")


@dataclass(frozen=True)
class Tolerance:
    """The largest difference of norm, least and greatest element; without one, bits are compared.

    Attributes:
        relative: as a share of the larger norm, or of the largest magnitude.
        ulps: in units in the last place of the dtype, of two dtypes the coarser one. Tensors whose elements differ by so many
            at most have norms that do; those of integers have none.
    """

    relative: float = 0.0
    ulps: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Tolerance:
        """Read `1e-3`, or `4ulp`.

        Raises:
            ValueError: it is neither.
        """
        found = _WRITTEN.fullmatch(text.strip().lower())
        number = float(found["number"]) if found else math.nan
        if found is None or not math.isfinite(number) or number < 0:
            raise ValueError(f"not a tolerance: {text}")
        return cls(ulps=number) if found["unit"] else cls(number)

    def __bool__(self) -> bool:
        """Whether anything but equal bits counts as equal."""
        return bool(self.relative or self.ulps)

    def __str__(self) -> str:
        """Return it as it is written."""
        return f"{self.ulps:g} ulp" if self.ulps else f"{self.relative:g}"

    def of(self, *dtypes: str) -> float:
        """Return the largest relative difference of two tensors of these dtypes."""
        digits = [_DIGITS.get(dtype) for dtype in dtypes]
        unit = 0.0 if None in digits else 2.0 ** -min(one for one in digits if one is not None)
        return max(self.relative, self.ulps * unit)
