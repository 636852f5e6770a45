"""The kernel of Triton, without a GPU: what it computes in Triton's interpreter, and that it compiles for GPUs."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from hookd.target.tensors import fused, statistics
from hookd.target.tensors.statistics import Numeric
from tests.support.environment import REPOSITORY, tool_environment

with_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

PREAMBLE = """
import math, torch
from types import SimpleNamespace
from hookd.target.tensors import device_digest, device_kernel, statistics

def compare(tensor):
    has_sums = tensor.dtype in device_kernel.WIDTHS
    parts, rows = device_kernel.launch(tensor, has_sums=has_sums)
    assert torch.equal(parts, device_digest.digest_parts(tensor)), tensor
    if has_sums:
        sums, expected = statistics._combined(rows), statistics.device_sums(tensor)
        torch.testing.assert_close(sums, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
"""

OF_EACH_TYPE_AND_SIZE = """
torch.manual_seed(0)
floats = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
for dtype in [*floats, torch.int64, torch.bool, torch.float8_e4m3fn]:
    for size in (1, 3, 7, 8, 1023, 4099, 20_001):
        tensor = (torch.randn(size) * 3 + 1).to(dtype)
        if dtype in floats and size > 5:
            tensor[:5] = torch.tensor([math.nan, math.inf, -math.inf, 0.0, torch.finfo(dtype).max], dtype=dtype)
        compare(tensor)
"""

OF_UNUSUAL_NUMBERS = """
for value in (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, 3e38):
    compare(torch.full((9000,), value))
"""

AS_NUMERIC_USES_IT = """
import os
statistics.on_host = lambda tensor: False
tensors = [torch.randn(100, 7), torch.randn(8, 8).t(), torch.arange(9), torch.empty(0), torch.rand(99).bfloat16()[1:]]
found, summaries, log = [], [], []
for wanted in "10":
    os.environ["HOOKD_TRITON"] = wanted
    numbers = statistics.Numeric(lambda context, then, values: then(values))
    assert (numbers._fused._launch is not None) == (wanted == "1")
    for tensor in tensors:
        numbers.digest(SimpleNamespace(log=log.append), tensor, found.append, None)
    numbers.summary(SimpleNamespace(log=log.append), tensors[0], summaries.append)
    numbers.later.end_step()
torch.testing.assert_close(tuple(summaries[0]), tuple(summaries[1]), rtol=1e-5, atol=1e-6)
for ours, theirs in zip(found[:5], found[5:], strict=True):
    assert (ours.bits, ours.algorithm) == (theirs.bits, theirs.algorithm)
    assert (ours.extent is None) == (theirs.extent is None)
    for one, other in zip(ours.extent or (), theirs.extent or (), strict=True):
        assert math.isclose(one, other, rel_tol=1e-5)
assert not log, log
"""

COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton

types = {"memory": "*u8", "digests": "*i64", "rows": "*fp64", "size": "i64"}
names = ("BLOCK", "WIDTH", "IS_BFLOAT16")
for width, is_bfloat16 in ((0, False), (16, False), (16, True), (32, False), (64, False)):
    constants = dict(zip(names, (device_kernel.BLOCK, width, is_bfloat16)))
    source = ASTSource(device_kernel._kernel, {**types, **dict.fromkeys(names, "constexpr")}, constants)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
"""


def run(code, **variables):
    """Run code in a process of its own: Triton decides at its import whether it interprets."""
    done = subprocess.run(
        [sys.executable, "-c", f"{PREAMBLE}{code}\nprint('done')"], cwd=REPOSITORY,
        env={**tool_environment(), **variables}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.stdout == "done\n", done.stderr[-3000:]


@with_triton
def test_in_the_interpreter_it_computes_what_torchs_operations_do():
    run(OF_EACH_TYPE_AND_SIZE + OF_UNUSUAL_NUMBERS + AS_NUMERIC_USES_IT, TRITON_INTERPRET="1")


@with_triton
def test_it_compiles_for_a_gpu(tmp_path):
    run(COMPILED, TRITON_CACHE_DIR=str(tmp_path))


def numbers(log):
    return Numeric(lambda _context, then, values: then(values)), SimpleNamespace(log=log.append)


def test_a_kernel_that_fails_is_not_used_again_and_that_is_logged_once(monkeypatch):
    monkeypatch.setattr(statistics, "on_host", lambda _tensor: False)
    monkeypatch.setenv(fused.WANTED, "1")
    monkeypatch.setitem(
        sys.modules, "hookd.target.tensors.device_kernel", SimpleNamespace(launch=lambda *_, **__: 1 / 0)
    )
    found, log = [], []
    made, context = numbers(log)
    for _ in range(3):
        made.digest(context, torch.randn(100), found.append, None)
    made.later.end_step()
    made.close()
    assert len(found) == 3
    (line,) = log
    assert "ZeroDivisionError" in line


def test_without_triton_torchs_operations_take_its_place(monkeypatch):
    monkeypatch.setenv(fused.WANTED, "1")
    monkeypatch.delitem(sys.modules, "hookd.target.tensors.device_kernel", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    log = []
    for _ in range(2):
        assert fused.Fused().run(SimpleNamespace(log=log.append), torch.ones(3), has_sums=True) is None
    assert len(log) == 2
