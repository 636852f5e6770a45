"""Print what the kernel of this machine computes of the same numbers on every machine, as JSON. Needs nothing but Python and the kernel.

python bits.py KERNEL.so [LEVEL]
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import struct
import sys
from array import array
from pathlib import Path

DTYPES = {"float32": (0, 4), "float64": (1, 8), "float16": (2, 2), "bfloat16": (3, 2)}
"""Number in kernel.c, and bytes of an element."""
SIZES = (
    1,
    2,
    3,
    7,
    8,
    15,
    16,
    31,
    60,
    63,
    64,
    65,
    119,
    120,
    121,
    255,
    256,
    257,
    511,
    513,
    1023,
    1025,
    2047,
    2048,
    2049,
    4096,
    10007,
    70001,
)
SIGN_AND_EXPONENT = {"float32": 9, "float64": 12, "float16": 6, "bfloat16": 9}
STATISTICS = ("count", "mean", "squares", "min", "max", "zeros", "nans", "infs", "negative infs")


def numbers(dtype: str, size: int, kind: str) -> bytes:
    """Return `size` numbers: of any bits (so with infinities and NaNs), moderate ones, or ones with many zeros."""
    width = DTYPES[dtype][1]
    raw = bytearray(hashlib.shake_128(f"{dtype} {size} {kind}".encode()).digest(size * width))
    if kind != "any":
        for at in range(0, len(raw), width):
            word = int.from_bytes(raw[at : at + width], "little")
            fraction = 8 * width - SIGN_AND_EXPONENT[dtype]
            bias = (1 << (SIGN_AND_EXPONENT[dtype] - 2)) - 1
            exponent = bias - 3 + (word >> fraction) % 8  # magnitudes from 1/8 to 32
            word = word & ((1 << fraction) - 1) | exponent << fraction | word >> (8 * width - 1) << (8 * width - 1)
            raw[at : at + width] = (word if kind == "moderate" or word % 3 else 0).to_bytes(width, "little")
    return bytes(raw)


def computed(kernel: ctypes.CDLL, level: int) -> dict[str, list[object]]:
    kernel.hookd_digest_extent.restype = kernel.hookd_digest.restype = ctypes.c_uint64
    kernel.hookd_largest.restype = ctypes.c_double
    place, long = ctypes.c_void_p, ctypes.c_int64
    kernel.hookd_digest.argtypes = place, long, ctypes.c_int
    kernel.hookd_digest_extent.argtypes = place, long, ctypes.c_int, ctypes.c_int, place
    kernel.hookd_summary.argtypes = place, long, ctypes.c_int, ctypes.c_int, place
    kernel.hookd_summary_strided.argtypes = place, ctypes.c_int, place, place, ctypes.c_int, ctypes.c_int, place
    kernel.hookd_is_finite.argtypes = place, long, ctypes.c_int, ctypes.c_int
    kernel.hookd_largest.argtypes = place, place, ctypes.c_int, ctypes.c_int, ctypes.c_int
    found: dict[str, list[object]] = {}
    for dtype, (number, width) in DTYPES.items():
        for size in SIZES:
            for kind in ("any", "moderate", "zeros"):
                data = numbers(dtype, size, kind)
                at = ctypes.addressof(own := ctypes.create_string_buffer(data, len(data)))
                out, strided = (ctypes.c_double * 10)(), (ctypes.c_double * 10)()
                kernel.hookd_summary(at, size, number, level, out)
                digest = kernel.hookd_digest_extent(at, size, number, level, ends := (ctypes.c_double * 5)())
                if (ends[0], *ends[2:]) != (out[0], *out[3:5], sum(out[6:9])):
                    raise ValueError(f"{dtype} {size} {kind}: {list(ends)} of {list(out)}")
                shape, strides = array("q", [(size + 1) // 2]), array("q", [2])
                both = shape.buffer_info()[0], strides.buffer_info()[0]
                kernel.hookd_summary_strided(at, 1, *both, number, level, strided)
                places, sizes = array("Q", [at]), array("q", [size])
                largest = kernel.hookd_largest(places.buffer_info()[0], sizes.buffer_info()[0], 1, number, level)
                finite = kernel.hookd_is_finite(at, size, number, level)
                sums = [struct.pack("<d", value).hex() for value in (*out[:9], *strided[:9], largest)]
                bytewise = kernel.hookd_digest(at, size * width, level)
                found[f"{dtype} {size} {kind}"] = [f"{digest:016x}", f"{bytewise:016x}", finite, *sums]
                del own
    for size in range(1, 300):
        data = hashlib.shake_128(b"bytes").digest(size)
        found[f"bytes {size}"] = [f"{kernel.hookd_digest(data, size, level):016x}"]
    return found


if __name__ == "__main__":
    library = ctypes.CDLL(str(Path(sys.argv[1]).resolve()))
    print(json.dumps(computed(library, int(sys.argv[2]) if len(sys.argv) > 2 else library.hookd_level())))  # noqa: PLR2004
