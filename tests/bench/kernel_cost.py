"""The cost of all statistics of a tensor, relative to reading it once, and to torch's operations one after the other.

    python -m tests.bench --only kernel_cost

One process, one thread, in turns, the shortest CPU time of a call. A pass is a sum of integers over the same memory as
the compiler optimizes it for this processor: the cheapest operation that reads every byte.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from hookd.native.build import build
from hookd.target.tensors import kernel
from tests.bench.tables import Bound, Report, Table

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

TITLE = "Statistics of a tensor"
READ = """
unsigned sum(const unsigned *restrict x, long n) {
    unsigned all = 0;
    for (long i = 0; i < n; i++)
        all += x[i];
    return all;
}
"""
ELEMENTS = (100_000, 1_000_000)
BARS = {torch.float32: 3.5, torch.float64: 3.5, torch.float16: 7.0, torch.bfloat16: 7.0}
NAIVE_RATIO = 10.0
ROUNDS = 15
ROUND_S = 0.02


class Found(NamedTuple):
    """Seconds of a call: a pass, all statistics, the same from Python, whether all is finite, torch one by one."""

    read: float
    dense: float
    called: float
    gate: float
    torch: float

    @property
    def passes(self) -> float:
        return self.dense / self.read

    @property
    def below_torch(self) -> float:
        return self.torch / self.called


class Bench:
    """The kernel and the pass, built in a directory.

    Raises:
        FileNotFoundError: there is no C compiler.
    """

    def __init__(self, directory: Path) -> None:
        self._kernel = kernel.load_image(build(directory)[0].read_bytes())
        self._read = read_pass(directory)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kernel.close()

    def measure(self, dtype: torch.dtype, elements: int, rounds: int = ROUNDS) -> Found:
        made, tensor = self._kernel, torch.randn(elements).to(dtype)
        words, address = tensor.numel() * tensor.element_size() // 4, tensor.data_ptr()
        out = (ctypes.c_double * (kernel.SUMS + 1))()
        arguments = (address, elements, kernel.DTYPES[dtype], made.level, ctypes.addressof(out))
        return Found(*shortest(
            rounds,
            lambda: self._read(address, words),
            lambda: made._dense(*arguments),
            lambda: made.sums(tensor),
            lambda: made.gate(tensor),
            lambda: naive(tensor),
        ))  # fmt: skip


def read_pass(directory: Path) -> Callable[[int, int], int]:
    """Compile the sum."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise FileNotFoundError("no C compiler")
    source = directory / "read.c"
    source.write_text(READ)
    made = source.with_suffix(".so")
    subprocess.run([compiler, "-O3", "-march=native", "-shared", "-fPIC", "-o", made, source], check=True, timeout=60)
    function = ctypes.CDLL(str(made)).sum
    function.argtypes = [ctypes.c_void_p, ctypes.c_long]
    return function


def naive(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the statistics as a person would compute them."""
    return (x.min(), x.max(), x.mean(), x.std(), x.abs().max(), x.norm(), x.isnan().sum(), x.isinf().sum(),
            (x == 0).sum())  # fmt: skip


def shortest(rounds: int, *functions: Callable[[], object]) -> list[float]:
    """Return the shortest CPU time of one call of each function, in s; they take turns, so all meet the same machine."""
    best = [float("inf")] * len(functions)
    for _ in range(rounds):
        for at, function in enumerate(functions):
            began, calls = time.thread_time(), 0
            while time.thread_time() - began < ROUND_S:
                for _ in range(5):
                    function()
                calls += 5
            best[at] = min(best[at], (time.thread_time() - began) / calls)
    return best


def report(*, quick: bool = False) -> Report:
    """Measure all dtypes and sizes."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory, Bench(Path(directory)) as bench:
        found = {(dtype, elements): bench.measure(dtype, elements, 3 if quick else ROUNDS)
                 for dtype in BARS for elements in ELEMENTS}  # fmt: skip
    rows = [[str(dtype).removeprefix("torch."), f"{elements:,}", f"{one.read * 1e6:,.1f}", f"{one.passes:.2f}",
             f"{one.called / one.read:.2f}", f"{one.gate / one.read:.2f}", f"{one.torch / one.read:.1f}",
             f"{one.below_torch:.1f}"] for (dtype, elements), one in found.items()]  # fmt: skip
    columns = ["dtype", "elements", "a pass, µs", "all statistics, passes", "called from Python", "whether all is finite",
               "torch one by one", "torch, to ours"]  # fmt: skip
    return Report([Table("Mean, deviation, extremes, norm, zeros, NaN and infinities of one tensor", columns, rows)],
                  [bound for (dtype, elements), one in found.items() for bound in bounds(dtype, elements, one)])  # fmt: skip


def bounds(dtype: torch.dtype, elements: int, found: Found) -> list[Bound]:
    """Compare with the promised bounds."""
    name = f"{dtype}, {elements:,}".removeprefix("torch.")
    return [Bound(f"{name}: passes for all statistics", BARS[dtype], found.passes),
            Bound(f"{name}: ours to torch's", 1 / NAIVE_RATIO, 1 / found.below_torch)]  # fmt: skip
