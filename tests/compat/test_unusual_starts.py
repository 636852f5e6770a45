"""Targets that are started in another way than by a Python where it was installed: uv, a moved prefix, no site, a frozen program."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.compat.trainings import Training, watched
from tests.support.environment import TARGETS, bare_python, target_environment
from tests.support.tool import Page, run

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.e2e, pytest.mark.load, pytest.mark.usefixtures("attachable")]

NO_SITE = """
import os, runpy, sys
sys.path += [sys.argv[1], os.path.dirname(sys.argv[2])]
del sys.argv[:2]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def packages() -> Path:
    """Return the site-packages that have torch and no hookd."""
    return bare_python().parents[1] / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"


def test_without_site_and_environment(tmp_path):
    with watched(Training([bare_python(), "-I", "-S", "-c", NO_SITE, packages()], tmp_path), "nan", "timing"):
        pass


@pytest.fixture
def moved(tmp_path) -> list[str | Path]:
    """Copy this Python without its packages into another directory, as an unpacked conda environment is; return what starts it."""
    prefix = tmp_path / "prefix"
    library = prefix / "lib" / f"python{sysconfig.get_python_version()}"
    ignored = shutil.ignore_patterns("site-packages", "dist-packages", "test", "__pycache__", "config-*")
    shutil.copytree(sysconfig.get_path("stdlib"), library, ignore=ignored)
    (library / "site-packages").symlink_to(packages())
    (prefix / "bin").mkdir()
    python = shutil.copy(os.path.realpath(sys._base_executable), prefix / "bin" / "python")
    for name in Path(sysconfig.get_config_var("LIBDIR")).glob("libpython3*.so*"):
        shutil.copy(name, prefix / "lib")
    command = ["env", f"LD_LIBRARY_PATH={prefix / 'lib'}", python]
    said = subprocess.run(
        [*command, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True, check=True,
        env=target_environment(),
    ).stdout  # fmt: skip
    assert said.strip() == str(prefix)
    return command


def test_a_moved_prefix(tmp_path, moved):
    with watched(Training(moved, tmp_path), "nan", "timing"):
        pass


@pytest.fixture
def frozen() -> Iterator[list[str | Path]]:
    """Freeze the training into a directory with a Python and a torch of its own; return what starts it in place of a script."""
    pytest.importorskip("PyInstaller")
    with tempfile.TemporaryDirectory(prefix="frozen-") as name:  # more than 1 GB, which pytest would keep
        home = Path(name)
        places = [f"--{kind}path={home / kind}" for kind in ("dist", "work", "spec")]
        command = [sys.executable, "-m", "PyInstaller", "--log-level=ERROR", *places, TARGETS / "mlp.py"]
        subprocess.run(command, check=True, timeout=1500, cwd=home, env=target_environment())
        yield ["sh", "-c", f'shift; exec {home / "dist" / "mlp" / "mlp"} "$@"', "sh"]


@pytest.mark.timeout(1800)
def test_a_program_that_was_frozen_by_pyinstaller(tmp_path, frozen):
    with watched(Training(frozen, tmp_path), "nan", "timing", "activations", "learning"):
        pass


@pytest.fixture
def uv_run() -> list[str | Path]:
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists():
        pytest.skip("no uv here: `make .venv/.long`")
    return [uv, "run", "--no-project", "--offline", "--python", bare_python()]


def test_a_child_of_uv_run(tmp_path, uv_run):
    training = Training([*uv_run, "--"], tmp_path)
    with watched(training, "nan", "timing", pid_of=lambda uv: psutil.Process(uv.pid).children()[0].pid):
        pass


def test_uv_run_under_hookd_run(tmp_path, uv_run):
    Training(uv_run, tmp_path)
    program = [*uv_run, tmp_path / "mlp.py", "--steps", "1500"]
    with run("-p", "timing", program=program) as process, Page.below(process) as page:
        assert process.finish()[-1].startswith("done ")
        assert page.values()["hookd_steps"][()] == 1500
