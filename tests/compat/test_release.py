"""`make dist`: the same bytes in two directories, and wheels that install alone, with pip on every CPython here, pipx and uv."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compat import tools
from tests.support.environment import REPOSITORY, bare_python, target_environment
from tests.support.processes import Process

pytestmark = [pytest.mark.e2e, pytest.mark.load, pytest.mark.timeout(900)]


def made(directory: Path) -> Path:
    """Run `make dist` in a working tree; return the directory of the release."""
    done = subprocess.run(
        ["make", "dist", f"PYTHON={sys.executable}"], cwd=directory, capture_output=True, text=True, timeout=800,
        check=False, env=target_environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return directory / "dist"


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """Clone the last commit."""
    if not (REPOSITORY / ".git").exists():
        pytest.skip("this is not a git repository, and a release is made of a commit")
    return _cloned(tmp_path_factory.mktemp("one"))


def _cloned(directory: Path) -> Path:
    subprocess.run(["git", "clone", "--quiet", REPOSITORY, directory / "hookd"], check=True, timeout=60)
    return directory / "hookd"


@pytest.fixture(scope="module")
def release(clone):
    return made(clone)


@pytest.fixture(scope="module")
def wheel(release):
    """Return the wheel for this machine."""
    return next(release.glob(f"*_{os.uname().machine}.whl"))


def test_a_second_release_of_the_commit_is_the_same_to_the_byte(clone, release, tmp_path):
    other = _cloned(tmp_path)
    (other / "not-committed.py").touch()
    shutil.copytree(clone / "build", other / "build", symlinks=True)
    (other / "build" / "dist" / ".tools").touch()  # it is newer than the list of the tools, as in the first clone
    assert (made(other) / "SHA256SUMS").read_text() == (release / "SHA256SUMS").read_text()
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=release, check=True)
    assert len(list(release.glob("*.whl"))) == 2


def demo(*hookd: str | Path) -> None:
    """Run the demo of an installed hookd, with a target in another environment."""
    with Process([*hookd, "demo", "--python", bare_python()], env=target_environment(), cwd=Path("/")) as process:
        assert "identical, bit for bit" in "\n".join(process.finish())


@pytest.mark.usefixtures("attachable")
@pytest.mark.parametrize("minor", tools.MINORS)
def test_a_wheel_alone_runs_the_demo(minor, wheel, tmp_path):
    python = tools.install(minor, tmp_path / "tool", wheel)
    with Process([python, "-m", "hookd", "doctor"], env=target_environment()) as doctor:
        assert "handled in C" in " ".join(doctor.finish())
    demo(python.with_name("hookd"))


@pytest.mark.usefixtures("attachable")
@pytest.mark.parametrize("command", [("pipx", "install"), ("uv", "tool", "install")], ids=" ".join)
def test_a_tool_that_manages_tools_installs_hookd(command, wheel, tmp_path):
    program = Path(sys.executable).with_name(command[0])
    if not program.exists():
        pytest.skip(f"no {command[0]} here: `make .venv/.long`")
    places = ("PIPX_HOME", "PIPX_BIN_DIR", "PIPX_MAN_DIR", "UV_TOOL_DIR", "UV_TOOL_BIN_DIR")
    env = target_environment(**{name: tmp_path / name for name in places})
    subprocess.run([program, *command[1:], wheel], check=True, timeout=600, env=env)
    (hookd,) = tmp_path.glob("*_BIN_DIR/hookd")
    demo(hookd)
