"""The shared objects, compiled from this source tree for a test."""

from __future__ import annotations

import os
import runpy
from typing import TYPE_CHECKING

import pytest

from tests.support.environment import REPOSITORY

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = REPOSITORY / "hookd" / "native" / "build.py"


def build(directory: Path, name: str = "kernel") -> Path:
    """Compile them and return one; a machine without a compiler skips the test."""
    try:
        made: list[Path] = runpy.run_path(str(SCRIPT))["build"](directory)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    return next(path for path in made if path.stem == f"{name}-{os.uname().machine}")
