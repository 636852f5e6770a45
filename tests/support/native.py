"""The shared objects, compiled from this source tree for a test."""

from __future__ import annotations

import os
import runpy
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.support.environment import REPOSITORY, once

SCRIPT = REPOSITORY / "hookd" / "native" / "build.py"


def build(directory: Path, name: str = "kernel") -> Path:
    """Put one into a directory, compiled once for all tests; a machine without a compiler skips the test."""
    try:
        compiled = Path(_compiled().name)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    return Path(shutil.copy(compiled / f"{name}-{os.uname().machine}.so", directory))


@once
def _compiled() -> tempfile.TemporaryDirectory[str]:
    directory = tempfile.TemporaryDirectory(prefix="native-")
    runpy.run_path(str(SCRIPT))["build"](Path(directory.name))
    return directory
