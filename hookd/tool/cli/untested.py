"""What `hookd doctor` says of machines and builds of Python on which hookd has never been tried."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hookd.tool.cli.checks import Check

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# By the paths of what a process has mapped: the interpreter itself, its libraries.
_BUILDS = (
    (re.compile(r"/uv/python/|/cpython-3\.\d+\.\d+-linux-"), "a standalone build of Python, as uv installs them"),
    (
        re.compile(r"/(?:mini|ana)conda\d*/|/(?:mini|mamba)forge\d*/|/micromamba/|/conda/envs/"),
        "conda's build of Python",
    ),
    (re.compile(r"/ld-musl-"), "musl instead of glibc (Alpine)"),
)


def of_build(paths: Iterable[str]) -> Iterator[Check]:
    """Say for each such build that is among the mapped files that hookd was not tried there."""
    text = "\n".join(paths)
    for pattern, what in _BUILDS:
        if pattern.search(text):
            yield _untested(what)


def of_machine(architecture: str) -> Iterator[Check]:
    """Say that hookd has not been tried on real ARM hardware."""
    if architecture == "aarch64":
        yield _untested("aarch64: tried under emulation alone")


def _untested(what: str) -> Check:
    cure = "It may well work; try it on a process that may be lost, and report how it went."
    return Check("untested", "note", what, cure)
