"""What all statistics of a tensor cost, relative to reading it once, and to torch's operations one after the other."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import time

import pytest
import torch

from hookd.agent import kernel
from tests.support.native import build

pytestmark = [pytest.mark.bench, pytest.mark.load, pytest.mark.timeout(600)]

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


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    one = kernel.load_image(build(tmp_path_factory.mktemp("kernel")).read_bytes())
    yield one
    one.close()


@pytest.fixture(scope="module")
def read_pass(tmp_path_factory):
    """Give the cheapest thing that reads every byte: a sum of integers, as the compiler makes it for this processor."""
    source = tmp_path_factory.mktemp("read") / "read.c"
    source.write_text(READ)
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    made = source.with_suffix(".so")
    subprocess.run([compiler, "-O3", "-march=native", "-shared", "-fPIC", "-o", made, source], check=True, timeout=60)
    function = ctypes.CDLL(str(made)).sum
    function.argtypes = [ctypes.c_void_p, ctypes.c_long]
    return function


def naive(x):
    """Give what a person would write."""
    return (x.min(), x.max(), x.mean(), x.std(), x.abs().max(), x.norm(), x.isnan().sum(), x.isinf().sum(),
            (x == 0).sum())  # fmt: skip


def shortest(*functions):
    """Give the shortest CPU time of one call of each, in seconds; taken in turns, so that all meet the same machine."""
    best = [float("inf")] * len(functions)
    for _ in range(ROUNDS):
        for at, function in enumerate(functions):
            began, calls = time.thread_time(), 0
            while time.thread_time() - began < ROUND_S:
                for _ in range(5):
                    function()
                calls += 5
            best[at] = min(best[at], (time.thread_time() - began) / calls)
    return best


@pytest.mark.parametrize("elements", ELEMENTS)
@pytest.mark.parametrize("dtype", BARS, ids=str)
def test_all_statistics_cost_a_few_passes_over_the_memory(made, read_pass, dtype, elements):
    tensor = torch.randn(elements).to(dtype)
    words = tensor.numel() * tensor.element_size() // 4
    address = tensor.data_ptr()
    out = (ctypes.c_double * (kernel.SUMS + 1))()
    arguments = (address, elements, kernel.DTYPES[dtype], made.level, ctypes.addressof(out))
    one, all_of_them, called, gate, torchs = shortest(
        lambda: read_pass(address, words),
        lambda: made._dense(*arguments),
        lambda: made.sums(tensor),
        lambda: made.gate(tensor),
        lambda: naive(tensor),
    )
    print(
        f"\n{dtype!s:15} {elements:9,}: read {one * 1e6:7.1f} us, all {all_of_them / one:5.2f} x,"
        f" from Python {called / one:5.2f} x,"
        f" gate {gate / one:5.2f} x, torch one by one {torchs / called:6.1f} x that"
    )
    assert all_of_them <= BARS[dtype] * one
    assert torchs >= NAIVE_RATIO * called
