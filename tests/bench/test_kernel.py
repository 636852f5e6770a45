"""Bounds of the cost of all statistics of a tensor, relative to reading it once, and to torch's operations in turn."""

from __future__ import annotations

import pytest
import torch

from tests.bench.kernel_cost import BARS, ELEMENTS, Bench, bounds

pytestmark = [pytest.mark.bench, pytest.mark.load, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    try:
        one = Bench(tmp_path_factory.mktemp("kernel"))
    except FileNotFoundError as exc:
        pytest.skip(str(exc))
    with one:
        yield one


@pytest.mark.parametrize("elements", ELEMENTS)
@pytest.mark.parametrize("dtype", BARS, ids=str)
def test_all_statistics_cost_a_few_passes_over_the_memory(bench, dtype, elements):
    for bound in bounds(dtype, elements, bench.measure(dtype, elements)):
        assert bound.holds, bound
