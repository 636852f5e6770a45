"""The file that a command writes: its owner's alone, and whole or not there."""

from __future__ import annotations

import os
import stat

import pytest

from hookd.errors import HookdError
from hookd.tool.cli.trace import replacing


@pytest.fixture
def open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_umask")
def test_the_file_is_its_owners_alone_whatever_the_umask_is(tmp_path):
    path = tmp_path / "trace.json"
    with replacing(path) as file:
        file.write(b"{}")
    assert path.read_bytes() == b"{}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def write_half(path):
    with replacing(path) as file:
        file.write(b"half of")
        raise OSError(28, "No space left on device")


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "trace.json"
    path.write_bytes(b"old")
    with pytest.raises(HookdError, match=r"cannot write .*trace\.json: No space left on device"):
        write_half(path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["trace.json"]
