"""The kernel is compiled by an installation, which never fails for want of a compiler, and travels in the payload."""

from __future__ import annotations

import ast
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import zipfile

import pytest
from packaging.requirements import Requirement

from hookd.target.boot import stub
from hookd.tool.attach import payload
from tests.support.environment import REPOSITORY
from tests.support.native import SCRIPT, build

KERNEL = f"hookd/native/kernel-{os.uname().machine}.so"


@pytest.fixture
def tree(tmp_path):
    """Return a copy of the sources of a wheel, without a kernel."""
    there = tmp_path / "tree"
    skip = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("hookd", "plugins", "examples"):
        shutil.copytree(REPOSITORY / name, there / name, ignore=skip)
    for name in (".gitignore", "pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, there)
    return there


def wheel(tree, kind="build_wheel", **environment):
    """Build a wheel as pip does; return its file name and its content."""
    code = f"from hatchling.build import {kind} as build; print(build('out'))"
    (tree / "out").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tree, env={**os.environ, **environment}, capture_output=True, text=True,
        timeout=100, check=True,
    )  # fmt: skip
    name = done.stdout.split()[-1]
    with zipfile.ZipFile(tree / "out" / name) as archive:
        return name, set(archive.namelist()), done.stdout + done.stderr


def test_a_wheel_carries_the_kernel_and_is_for_this_kind_of_machine(tree, tmp_path):
    build(tmp_path)  # or skip
    name, files, _ = wheel(tree)
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert name.endswith(f"-py3-none-{platform}.whl")
    assert KERNEL in files


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_the_wheel_has_no_kernel_and_says_so(tree, compiler):
    name, files, said = wheel(tree, CC=compiler)
    assert name.endswith("-py3-none-any.whl")
    assert KERNEL not in files
    assert "hookd/native/kernel.c" in files
    assert "the native libraries were not built" in said


ZIG = """
import subprocess, sys
arguments = sys.argv[4:]
sys.exit(subprocess.run(["cc", *(one for one in arguments if one not in {ZIG_ONLY!r})]).returncode)
"""


@pytest.fixture
def ziglang(tmp_path):
    """Return a directory for PYTHONPATH in whose `ziglang` the system's compiler builds whatever it is asked for."""
    there = tmp_path / "path" / "ziglang"
    there.mkdir(parents=True)
    (there / "__init__.py").touch()
    of_zig = runpy.run_path(str(SCRIPT))["OF_ZIG"]
    (there / "__main__.py").write_text(ZIG.replace("{ZIG_ONLY!r}", repr(of_zig)))
    return str(there.parent)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_wheel_of_a_release_is_for_the_machine_that_is_named(tree, tmp_path, ziglang, machine):
    build(tmp_path)  # or skip
    build(tree / "hookd" / "native")  # what is left of another build stays out
    name, files, _ = wheel(tree, PYTHONPATH=ziglang, HOOKD_WHEEL_MACHINE=machine)
    assert name.endswith(f"-py3-none-manylinux_2_17_{machine}.manylinux2014_{machine}.musllinux_1_1_{machine}.whl")
    assert {one for one in files if one.endswith(".so")} == {
        f"hookd/native/{one}-{machine}.so" for one in ("entry", "kernel")
    }


def test_a_wheel_of_a_release_is_not_made_without_ziglang(tree):
    code = "from hatchling.build import build_wheel; build_wheel('out')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tree, env={**os.environ, "HOOKD_WHEEL_MACHINE": "aarch64"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "the package ziglang is not installed" in done.stderr
    assert done.returncode == 1


def test_only_the_shared_objects_of_its_own_machine_are_carried(monkeypatch, tree, tmp_path):
    build(tree / "hookd" / "native")
    build(tree / "hookd" / "native", "entry")
    for name in ("entry", "kernel"):
        (tree / "hookd" / "native" / f"{name}-riscv64.so").touch()
    monkeypatch.setattr(payload.hookd, "__file__", str(tree / "hookd" / "__init__.py"))
    native = [one for one in carried() if one.endswith(".so")]
    assert native == [f"hookd/native/{one}-{os.uname().machine}.so" for one in ("entry", "kernel")]


@pytest.mark.parametrize(("path", "expected"), [("/nowhere", ["ziglang"]), (os.environ["PATH"], [])])
def test_an_installation_asks_for_a_compiler_where_there_is_none(tree, tmp_path, path, expected):
    build(tmp_path)
    code = "from hatchling.build import get_requires_for_build_wheel as needed; print(needed())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tree, env={**os.environ, "PATH": path}, capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    assert [Requirement(one).name for one in ast.literal_eval(done.stdout)] == expected


def test_an_editable_installation_has_the_kernel_in_the_source_tree(tree, tmp_path):
    build(tmp_path)
    wheel(tree, "build_editable")
    assert (tree / KERNEL).exists()


def test_the_script_says_what_is_wrong():
    done = subprocess.run(
        [sys.executable, SCRIPT],
        env={**os.environ, "CC": "false"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "hookd uses torch operations and Python instead" in done.stderr


def test_the_payload_carries_the_kernel_that_is_there(monkeypatch, tree, tmp_path):
    image = build(tmp_path)
    monkeypatch.setattr(payload.hookd, "__file__", str(tree / "hookd" / "__init__.py"))
    assert KERNEL not in carried()
    shutil.copy(image, tree / KERNEL)
    assert carried()[KERNEL] == image.read_bytes()


def carried():
    return stub.unpack(payload.build(()).archive)
