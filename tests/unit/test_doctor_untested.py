"""`hookd doctor` says 'untested' where nobody has tried, and nowhere else."""

from __future__ import annotations

import pytest

from hookd.tool.cli import untested


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("/root/.local/share/uv/python/cpython-3.12.3-linux-x86_64-gnu/bin/python3.12", "uv"),
        ("/opt/cpython-3.13.1-linux-aarch64-gnu/lib/libpython3.13.so.1.0", "uv"),
        ("/home/user/miniconda3/bin/python3.11", "conda"),
        ("/opt/miniforge3/envs/train/bin/python3.11", "conda"),
        ("/lib/ld-musl-x86_64.so.1", "musl"),
        ("/usr/bin/python3.11", None),
        ("/root/.pyenv/versions/3.11.7/lib/libpython3.11.so.1.0", None),
        ("/usr/lib/python3/dist-packages/numpy/core/_umath.cpython-311-x86_64-linux-gnu.so", None),
    ],
)
def test_a_build_is_known_by_its_paths(path, what):
    found = list(untested.of_build(["/usr/lib/x86_64-linux-gnu/libc.so.6", path]))
    assert [what in check.found for check in found] == ([True] if what else [])
    assert all(check.state == "note" and check.name == "untested" and check.cure for check in found)


def test_real_arm_hardware_is_untested():
    assert [check.name for check in untested.of_machine("aarch64")] == ["untested"]
    assert list(untested.of_machine("x86_64")) == []
