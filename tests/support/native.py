"""The numeric kernel, compiled from this source tree for a test."""

from __future__ import annotations

import runpy
from typing import TYPE_CHECKING

import pytest

from tests.support.environment import REPOSITORY

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = REPOSITORY / "hookd" / "native" / "build.py"


def build(directory: Path) -> Path:
    """Compile it; a machine without a compiler skips the test."""
    try:
        made: Path = runpy.run_path(str(SCRIPT))["build"](directory)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    return made
