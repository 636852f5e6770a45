"""What a GPU can do at its best: dense products of bfloat16 a second, before Ampere of float16. Runs in the target.

The makers' figures, from public quotations of the documents that are named beside them (read in 2026). Where a document
prints a figure with structural sparsity alone, which is twice the dense one, half of it stands here. What two editions
disagree about (H200 NVL), or what only somebody else says (A10G), has no entry.

Names are compared whole, apart from the maker's: part of a GPU has more behind it ("MIG 1g.10gb"), and what is built for
one customer, or is one die with another memory, is called something else.
"""

from __future__ import annotations

import re

PEAKS: tuple[tuple[str, int | None, float], ...] = (
    # NVIDIA V100 data sheet 1165301-r5
    (r"V100-SXM2-(16|32)GB", None, 125e12),
    (r"V100-PCIE-(16|32)GB", None, 112e12),
    (r"V100S-PCIE-32GB", None, 130e12),
    # NVIDIA T4 data sheet 951643
    (r"T4", None, 65e12),
    # NVIDIA A10 data sheet (a10-datasheet.pdf): 125, 250 with sparsity
    (r"A10", None, 125e12),
    # NVIDIA A100 data sheet 2188504, May 2022: 312, 624 with sparsity, PCIe and SXM alike
    (r"A100-(SXM4|PCIE)-(40|80)GB|A100 80GB PCIe", None, 312e12),
    # nvidia.com/data-center/l4: 242 with sparsity
    (r"L4", None, 121e12),
    # NVIDIA L40 data sheet 2436245, November 2022: 181.05, 362.1 with sparsity
    (r"L40", None, 181.05e12),
    # NVIDIA L40S data sheet 2841316, August 2023: 362.05, 733 with sparsity
    (r"L40S", None, 362.05e12),
    # nvidia.com/data-center/h100: SXM 1,979, NVL 1,671 with sparsity
    (r"H100 80GB HBM3", None, 989.5e12),
    (r"H100 NVL", None, 835.5e12),
    # NVIDIA H100 data sheet (nvidia-tensor-core-gpu-datasheet): PCIe 1,513 with sparsity
    (r"H100 PCIe", None, 756.5e12),
    # NVIDIA H200 data sheet 3367400, July 2024: SXM 1,979 with sparsity
    (r"H200", None, 989.5e12),
    # NVIDIA Blackwell data sheet 3384703: HGX B200 36,000 with sparsity, for 8 of them
    (r"B200", None, 2250e12),
    # AMD Instinct MI250X product page: 383 for a card, of which a device is one of two dies
    (r"MI250X", None, 191.5e12),
    # AMD Instinct MI300X data sheet: 1,307.4. A partition has the whole one's name, and fewer compute units.
    (r"MI300X", 304, 1307.4e12),
)
"""Name as a regular expression, multiprocessors where the name does not tell a part from the whole, operations per
second."""
MAKER = r"(NVIDIA |AMD Instinct )?(Tesla )?"


def peak_flops(name: str, processors: int) -> float | None:
    """Look a device up.

    Args:
        name: of the device, as torch says it.
        processors: how many multiprocessors (compute units) it has.

    Returns:
        Operations per second; None for a device that is not in the table.
    """
    for pattern, whole, flops in PEAKS:
        if re.fullmatch(f"{MAKER}(?:{pattern})", name) and whole in {None, processors}:
            return flops
    return None
