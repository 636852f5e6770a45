"""The cost of `hookd fingerprint` at every step, beside that of reading the same bytes once.

    python -m tests.bench --only fingerprint

One process, one thread, CPU time. A bare reading is a sum of integers over each tensor at the moment at which its digest is wanted, so both find
the same memory in the same caches. Then the whole plugin: steps with and without it in blocks that alternate.
"""

from __future__ import annotations

import ctypes
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hookd.target.tensors import kernel
from hookd.testing.pairs import QUICK_PAIRS, alternate
from tests.bench import workloads
from tests.bench.attached import Attached
from tests.bench.kernel_cost import read_pass, shortest
from tests.bench.tables import Bound, Report, Table

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from hookd import Context, Digest
    from hookd.target.tensors.statistics import Numeric

TITLE = "Fingerprints"
OPTIONS = {"every": 1, "buffer": 256}
BLOCK, WARM, ROUNDS = 5, 10, 9
"""Steps in a block, and before anything is measured, and rounds of one tensor."""
ELEMENTS = 32_000_000
"""Of a tensor that no cache holds."""
BARS = {torch.float32: 1.6, torch.float64: 1.6, torch.bfloat16: 2.5, torch.float16: 3.0}


class Passes(NamedTuple):
    """The tensors that one step reads.

    Attributes:
        tensors, bytes: how many digests, and of how much.
        read, digest: seconds of CPU time of a bare reading, and of the digests with norms and extremes.
    """

    tensors: float
    bytes: float
    read: float
    digest: float


class Meter:
    """Stands in for the function of an agent that computes digests: reads each tensor as well, and takes the time of both."""

    def __init__(self, numeric: Numeric, read: Callable[[int, int], int]) -> None:
        self._digest, self._read = numeric.digest, read
        self._found: list[tuple[int, float, float]] = []

    def __call__(self, context: Context, tensor: Tensor, *after: Any) -> Digest | None:
        """Return what the function returns."""
        size = tensor.numel() * tensor.element_size()
        calls: list[Callable[[], Any]] = [
            lambda: self._read(tensor.data_ptr(), size // 4),
            lambda: self._digest(context, tensor, *after),
        ]
        taken, found = [0.0, 0.0], None
        for at in (0, 1) if len(self._found) % 2 else (1, 0):  # the second finds the memory in the caches
            began = time.thread_time()
            made = calls[at]()
            taken[at] = time.thread_time() - began
            found = made if at else found
        self._found.append((size, *taken))
        return found

    def passes(self, steps: int) -> Passes:
        """Return the means of some steps."""
        sizes, read, digest = (sum(column) / steps for column in zip(*self._found, strict=True))
        return Passes(len(self._found) / steps, sizes, read, digest)


def of_memory(read: Callable[[int, int], int], dtype: torch.dtype, rounds: int) -> tuple[float, float, float]:
    """Return the seconds in which a tensor is read from memory, has a digest, and has a digest with norm and extremes."""
    made, tensor, out = kernel.load(), torch.randn(ELEMENTS).to(dtype), kernel._Ends()
    assert made is not None, "hookd's native part is not built"
    size, address = tensor.numel() * tensor.element_size(), tensor.data_ptr()
    how = kernel.DTYPES[dtype], made.level, ctypes.addressof(out)
    found = shortest(
        rounds,
        lambda: read(address, size // 4),
        lambda: made._long.digest(address, size, made.level),
        lambda: made._long.digest_extent(address, ELEMENTS, *how),
    )
    made.close()
    return found[0], found[1], found[2]


def measure(workload: str, read: Callable[[int, int], int], pairs: int) -> tuple[Passes, float, float]:
    """Return what a step reads, the seconds of a step without the plugin, and the ratio with it."""
    job = workloads.Job(workload)
    with Attached([("fingerprint", OPTIONS)], budget=100.0) as attached:
        for _ in range(WARM):
            job.step()
        numeric = attached.parts.host.numeric
        numeric.digest = meter = Meter(numeric, read)
        for _ in range(2 * BLOCK):
            job.step()
        del numeric.digest
        attached.leave()
        found = alternate(lambda: job.block(BLOCK), attached.on, pairs, job.step)
    return meter.passes(2 * BLOCK), sorted(found.plain)[len(found.plain) // 2] / 1e9, found.ratio.value


def report(*, quick: bool = False) -> Report:
    """Measure tensors of each type, and all workloads."""
    workloads.steady()
    rows, of_types, bounds = [], [], []
    with tempfile.TemporaryDirectory() as directory:
        read = read_pass(Path(directory))
        for dtype, bar in BARS.items():
            name = str(dtype).removeprefix("torch.")
            read_s, digest_s, all_s = of_memory(read, dtype, 3 if quick else ROUNDS)
            speed = ELEMENTS * dtype.itemsize / read_s / 1e9
            of_types.append([name, f"{speed:.1f} GB/s", f"{digest_s / read_s:.2f}", f"{all_s / read_s:.2f}"])
            bounds.append(Bound(f"{name}: digest, norm and extremes, in passes", bar, all_s / read_s))
        for name in workloads.available():
            passes, step_s, ratio = measure(name, read, QUICK_PAIRS if quick else 3 * QUICK_PAIRS)
            rows.append([
                name, f"{step_s * 1e3:.1f} ms", f"{passes.tensors:.0f} of {passes.bytes / 1e6:.1f} MB", f"{passes.read * 1e3:.2f} ms",
                f"{passes.digest * 1e3:.2f} ms", f"{(ratio - 1) * step_s * 1e3:.2f} ms", f"{ratio:.2f}",
            ])  # fmt: skip
    return Report(
        [
            Table(
                f"A tensor of {ELEMENTS:,} elements, in passes",
                ["dtype", "a pass", "digest", "digest, norm and extremes"],
                of_types,
            ),
            Table(
                "Forward, gradients and update of every step",
                [
                    "training",
                    "a step",
                    "digests",
                    "bare reading",
                    "digests, norms, extremes",
                    "the whole plugin",
                    "step with it",
                ],
                rows,
            ),
        ],
        bounds,
    )
