"""Compile kernel.c beside itself, where there is a C compiler. Tool side; it needs nothing of hookd's.

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
FLAGS = ("-O3", "-shared", "-fPIC", "-s", "-std=gnu11", "-nostdlib", "-nostartfiles", "-ffreestanding",
         "-fno-stack-protector", "-fno-strict-aliasing", "-fno-tree-loop-distribute-patterns", "-fvisibility=hidden")  # fmt: skip
"""No function of any library is called, so that one file serves glibc and musl, and no symbol is to be looked up."""
TIMEOUT_S = 120


def build(directory: Path = HERE) -> Path:
    """Compile the kernel into `directory`, at one stroke: who reads it meanwhile gets the old one or the new one.

    Raises:
        OSError: there is no compiler, or it failed; the message is for a person. Whoever installs goes on without.
    """
    compiler = os.environ.get("CC") or next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    if compiler is None:
        raise FileNotFoundError("no C compiler: neither cc nor gcc nor clang is there, and CC is not set")
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        made = Path(scratch, "kernel.so")
        command = [*shlex.split(compiler), *FLAGS, "-o", str(made), str(HERE / "kernel.c"), "-lgcc"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.SubprocessError as error:
            said = (getattr(error, "stderr", None) or str(error)).strip()
            raise OSError(f"{shlex.join(command)}: {said}") from error
        made.chmod(0o644)
        return made.replace(directory / "kernel.so")


if __name__ == "__main__":
    try:
        print(build())  # noqa: T201  # a script
    except OSError as error:
        sys.exit(f"the kernel was not built, and torch's own operations take its place: {error}")
