"""Compile the kernel and the entry beside their sources, where there is a C compiler. Tool side; it needs nothing of hookd's.

An installation runs this (hatch_build.py). In a source tree that is used through PYTHONPATH:

    python hookd/native/build.py
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = {"kernel": ("kernel.c",), "entry": ("entry.c", "calls.c", "tensors.c", "graph.c")}
"""By shared object."""
FLAGS = ("-O3", "-shared", "-fPIC", "-s", "-std=gnu11", "-nostdlib", "-nostartfiles", "-ffreestanding",
         "-fno-stack-protector", "-fno-strict-aliasing", "-fno-tree-loop-distribute-patterns", "-fvisibility=hidden")  # fmt: skip
"""No function of libc is called, so that one file serves glibc and musl; the entry's symbols are those of the interpreter."""
TIMEOUT_S = 120


def build(directory: Path = HERE) -> list[Path]:
    """Compile the shared objects of SOURCES into `directory` and return them in that order.

    Each is replaced at one stroke: whoever reads it meanwhile gets the old one or the new one.

    Raises:
        OSError: there is no compiler, or it failed; the message is for a person. Whoever installs goes on without.
    """
    compiler = os.environ.get("CC") or next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    if compiler is None:
        raise FileNotFoundError("no C compiler: neither cc nor gcc nor clang is there, and CC is not set")
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        made = [_compiled(shlex.split(compiler), name, Path(scratch)) for name in SOURCES]
        return [one.replace(directory / one.name) for one in made]


def _compiled(compiler: list[str], name: str, directory: Path) -> Path:
    made = directory / f"{name}.so"
    command = [*compiler, *FLAGS, "-o", str(made), *(str(HERE / source) for source in SOURCES[name]), "-lgcc"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.SubprocessError as error:
        said = (getattr(error, "stderr", None) or str(error)).strip()
        raise OSError(f"{shlex.join(command)}: {said}") from error
    made.chmod(0o644)
    return made


if __name__ == "__main__":
    try:
        print(*build(), sep="\n")  # noqa: T201  # a script
    except OSError as error:
        sys.exit(f"kernel and entry were not built: torch's own operations and Python take their place: {error}")
