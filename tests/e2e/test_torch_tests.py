"""The comparison of torch's own tests, shown on a test file that hookd makes fail on purpose."""

from __future__ import annotations

import json
import sys

import pytest

from tests.support.environment import tool_environment
from tests.support.processes import Process

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("attachable")]
FILE = "test_stateless.py"
TESTS = """
import ctypes
import os
import signal
import unittest
from pathlib import Path

import torch
from torch import nn

HAS_RUN = Path(__file__).with_suffix(".once")


entry_of = ctypes.pythonapi.PyVectorcall_Function
entry_of.restype, entry_of.argtypes = ctypes.c_void_p, (ctypes.py_object,)


def is_observed():
    is_torchs = nn.Module.__call__.__code__.co_filename == nn.Module._call_impl.__code__.co_filename
    return not is_torchs or entry_of(nn.Module.__call__) != entry_of(is_observed)


class TestAll(unittest.TestCase):
    def test_a_is_the_same(self):
        nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()

    def test_b_ends_the_process_with_hookd(self):
        if is_observed():
            os.kill(os.getpid(), signal.SIGSEGV)

    def test_c_fails_with_hookd(self):
        self.assertFalse(is_observed())

    def test_d_passes_once(self):
        self.assertFalse(HAS_RUN.exists())
        HAS_RUN.touch()

    @unittest.skip("on purpose")
    def test_e_is_skipped(self):
        pass
"""


@pytest.mark.load
def test_a_difference_is_reported_by_the_tests_name_and_a_crash_does_not_hide_the_tests_behind_it(tmp_path):
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_nn.py").touch()
    (tmp_path / "test" / FILE).write_text(TESTS)
    kept, table = tmp_path / "all.json", tmp_path / "table.md"
    command = [sys.executable, "-m", "tests.torch_tests", "--sources", tmp_path, "--only", FILE, "--mode", "plain"]
    command += ["--mode", "in process", "--mode", "attached"]
    with Process([*command, "--json", kept, "--out", table], env=tool_environment()) as process:
        assert process.wait(360) == 1, process.describe()
    found = json.loads(kept.read_text())
    outcomes = {mode: list(result["outcomes"].values()) for mode, result in found["results"][FILE].items()}
    assert outcomes["plain"] == ["passed", "passed", "passed", "passed", "skipped"], process.describe()
    assert outcomes["plain again"] == ["passed", "passed", "passed", "failed", "skipped"]
    for mode in ("in process", "attached"):
        assert outcomes[mode][:3] == ["passed", "crashed (SIGSEGV)", "failed"]
        assert outcomes[mode][4] == "skipped"
        assert found["results"][FILE][mode]["seen"]["forward calls"] > 0, "hookd has not looked"
        assert f"{mode}: {FILE}::TestAll::test_c_fails_with_hookd: passed, then failed" in found["differences"]
        crash = f"{mode}: {FILE}::TestAll::test_b_ends_the_process_with_hookd: passed, then crashed (SIGSEGV)"
        assert crash in found["differences"]
    assert f"plain again: {FILE}::TestAll::test_d_passes_once: passed, then failed" in found["differences"]
    assert len(found["differences"]) == 5, "neither the test that fails by itself nor what hookd has left"
    assert "| all | 5 tests" in table.read_text()
