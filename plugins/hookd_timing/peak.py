"""Peak performance of GPUs: dense bfloat16 operations per second (float16 before Ampere).

These are the manufacturers' figures, from public quotations of the documents named beside them (read in 2026). If a
document only has a figure with structural sparsity, which is twice the dense one, half of it is used. A GPU on which
two editions disagree (H200 NVL), or with figures from third parties only (A10G), has no entry.

Names are matched as a whole, except for the manufacturer: a part of a GPU has a longer name ("MIG 1g.10gb"), and GPUs
built for one customer, or with the same die and another memory, have other names.
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
"""Name as a regular expression; multiprocessors, if the name does not distinguish a part from the whole; operations per
second."""
MAKER = r"(NVIDIA |AMD Instinct )?(Tesla )?"


def peak_flops(name: str, processors: int) -> float | None:
    """Return the peak of a device.

    Args:
        name: of the device, as torch reports it.
        processors: number of its multiprocessors (compute units).

    Returns:
        Operations per second; None for a device that is not in the table.
    """
    for pattern, whole, flops in PEAKS:
        if re.fullmatch(f"{MAKER}(?:{pattern})", name) and whole in {None, processors}:
            return flops
    return None
