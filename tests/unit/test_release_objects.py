"""A shared object that does not load with every C library never gets into a wheel."""

from __future__ import annotations

import os
import runpy
import zipfile

import pytest

from tests.support import native
from tests.support.deployment import DEPLOY, run

pytest.importorskip("elftools")
OBJECTS = runpy.run_path(str(DEPLOY / "dist" / "objects.py"))
OWN = os.uname().machine
OTHER = "x86_64" if OWN == "aarch64" else "aarch64"


def wheel(directory, *files):
    with zipfile.ZipFile(directory / "one.whl", "w") as archive:
        for file in files:
            archive.write(file, file.name)
    return directory / "one.whl"


@pytest.mark.parametrize("name", ["entry", "kernel"])
def test_those_of_hookd_pass_for_their_own_machine_alone(tmp_path, name):
    made = wheel(tmp_path, native.build(tmp_path, name))
    OBJECTS["check"](made, OWN)
    with pytest.raises(ValueError, match=rf"one.whl: {name}-{OWN}.so is for EM_"):
        OBJECTS["check"](made, OTHER)


def test_a_library_a_version_and_a_symbol_of_one_libc_are_each_found(tmp_path):
    (tmp_path / "one.c").write_text('char *secure_getenv(const char *); char *one(void) { return secure_getenv("A"); }')
    code, output = run("cc", "-shared", "-fPIC", "-o", tmp_path / "one.so", tmp_path / "one.c")
    assert code == 0, output
    found = OBJECTS["problems"]((tmp_path / "one.so").read_bytes(), OWN)
    assert found[:2] == ["is linked to libc.so.6", "needs versions of symbols"]
    assert "secure_getenv" in found[2]


def test_a_wheel_without_any_is_no_wheel_of_a_release(tmp_path):
    with pytest.raises(ValueError, match=r"one\.whl has no shared object"):
        OBJECTS["check"](wheel(tmp_path), OWN)
