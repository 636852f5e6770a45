"""Directories for hookd's own files."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def make_private(directory: Path) -> None:
    """Create a directory and its missing parents with mode 0700, whatever the umask; leave existing ones unchanged."""
    # `Path.mkdir(parents=True)` applies its mode to the last directory only: with umask 0 the parents would be world-writable.
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)
