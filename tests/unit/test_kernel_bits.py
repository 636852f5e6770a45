"""Digests and exact statistics are the same on every machine and for every instruction set: runs of two machines can be compared."""

from __future__ import annotations

import ctypes
import hashlib
import json
import platform

import pytest

from tests.support import kernel_bits, native

EXACT = "6984cfd312644fe1b6e3d07df32ed88980e29b30d5438a2816babc57334a2bbf"
"""The sha256 of what is exact. It was computed on x86-64, with both of its older instruction sets, and on aarch64."""
SUMMED = {"mean", "squares"}
"""Their last bits depend on how many numbers are added at a time, and on whether a product is rounded before it is added."""


def exact(values):
    names = [*kernel_bits.STATISTICS] * 2 + ["largest"]
    return values[:3] + [value for name, value in zip(names, values[3:], strict=False) if name not in SUMMED]


@pytest.mark.parametrize("level", [0, "own"])
def test_what_is_exact_is_the_same_on_every_machine(tmp_path, level):
    kernel = ctypes.CDLL(str(native.build(tmp_path)))
    level = kernel.hookd_level() if level == "own" else level
    found = {name: exact(values) for name, values in kernel_bits.computed(kernel, level).items()}
    text = json.dumps(found, sort_keys=True)
    assert hashlib.sha256(text.encode()).hexdigest() == EXACT, platform.machine()
