"""Directories for hookd's own files."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def make_private(directory: Path) -> None:
    """Create a directory and those above it, for their owner alone whatever the umask is; existing ones stay as they are.

    `Path.mkdir` gives its mode to the last one only: under a umask of 0 everybody could replace what lies below the others.
    """
    missing = [one for one in (directory, *directory.parents) if not one.exists()]
    for one in reversed(missing):
        one.mkdir(mode=0o700, exist_ok=True)
