"""Versions of Python and torch that hookd supports. Imports nothing of hookd; used on both sides.

An older version is refused. A newer version is not refused. The attach checks the internals that it relies on: those of the interpreter from outside
(`hookd/tool/inject/foundation.py`), those of torch from inside (`hookd/target/boot/foundation.py`).
"""

from __future__ import annotations

import re

OLDEST_PYTHON = (3, 10)
NEWEST_PYTHON = (3, 15)
OLDEST_TORCH = (2, 1)
NEWEST_TORCH = (2, 15)


def minor(version: str) -> tuple[int, int]:
    """Return major and minor of a version such as `2.15.0+cu132`; (0, 0) if it does not begin with them."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def version_text(version: tuple[int, int]) -> str:
    """Return a version as text, such as "2.15"."""
    return f"{version[0]}.{version[1]}"


def untested(python: str, torch: str) -> str:
    """Return a line about versions that are newer than any tested one; "" if none is."""
    pairs = (("CPython", minor(python), NEWEST_PYTHON), ("torch", minor(torch), NEWEST_TORCH))
    newer = [
        f"{name} {version_text(actual)} (the newest tested is {version_text(newest)})"
        for name, actual, newest in pairs
        if actual > newest
    ]
    return f"not yet tested on {' and '.join(newer)}; all checks hold" if newer else ""
