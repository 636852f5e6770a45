"""Notes of `hookd doctor` on machines and builds of Python that hookd has not been tested on."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hookd.tool.cli.checks import Check

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# Recognized by the paths of mapped files: the interpreter and its libraries.
_BUILDS = (
    (re.compile(r"/uv/python/|/cpython-3\.\d+\.\d+-linux-"), "a standalone build of Python, as uv installs them"),
    (
        re.compile(r"/(?:mini|ana)conda\d*/|/(?:mini|mamba)forge\d*/|/micromamba/|/conda/envs/"),
        "conda's build of Python",
    ),
    (re.compile(r"/ld-musl-"), "musl instead of glibc (Alpine)"),
)


def of_build(paths: Iterable[str]) -> Iterator[Check]:
    """Yield a note for each untested build among the mapped files."""
    text = "\n".join(paths)
    for pattern, what in _BUILDS:
        if pattern.search(text):
            yield _untested(what)


def of_machine(architecture: str) -> Iterator[Check]:
    """Yield a note on ARM hardware, on which hookd has only been tested under emulation."""
    if architecture == "aarch64":
        yield _untested("aarch64: tested only under emulation")


def _untested(what: str) -> Check:
    cure = "It probably works; try it on a process that you can lose, and report the result."
    return Check("untested", "note", what, cure)
