"""Environments of the tool: hookd as users install it, without torch, on each version of CPython here."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.support import interpreters
from tests.support.environment import target_environment

if TYPE_CHECKING:
    from pathlib import Path

MINORS = [pytest.param(minor, id=f"{minor[0]}.{minor[1]}") for minor in interpreters.VERSIONS]


def install(minor: tuple[int, int], home: Path, what: Path) -> Path:
    """Make an environment on a version of CPython and install hookd from a source tree or a wheel; return its Python.

    The test is skipped if this machine lacks that version.
    """
    found = [one for one in interpreters.found() if one.minor == minor and one.root == interpreters.HERE]
    usable = [
        one for one in found if subprocess.run([*one.command, "-c", "import ensurepip"], check=False).returncode == 0
    ]
    if not usable:
        pytest.skip(f"no CPython {minor[0]}.{minor[1]} with ensurepip here; HOOKD_COMPAT_PYTHONS can name one")
    subprocess.run([*usable[0].command, "-m", "venv", home], check=True, timeout=300, env=target_environment())
    python = home / "bin" / "python"
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    absent = "import importlib.util as u; assert not u.find_spec('torch')"
    subprocess.run([python, "-c", absent], check=True, timeout=60)
    return python
