"""The shared objects compiled with AddressSanitizer and UndefinedBehaviorSanitizer, and the environment to load them."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.support.environment import REPOSITORY

if TYPE_CHECKING:
    from pathlib import Path

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
OPTIONS = ("-O2", "-g", "-shared", "-fPIC", "-std=gnu11", "-fno-strict-aliasing", "-fvisibility=hidden")


def build(name: str, directory: Path) -> Path:
    """Compile the kernel or the entry with the sanitizers, and with the usual optimization.

    Raises:
        OSError: there is no gcc, or it has failed.
    """
    made = directory / f"{name}.so"
    native = REPOSITORY / "hookd" / "native"
    sources = [native / source for source in runpy.run_path(str(native / "build.py"))["SOURCES"][name]]
    try:
        subprocess.run(
            ["gcc", *OPTIONS, *SANITIZERS, "-o", made, *sources], check=True, capture_output=True, timeout=300
        )
    except subprocess.CalledProcessError as error:
        raise OSError(error.stderr) from error
    return made


def preloaded() -> dict[str, str]:
    """Return what to add to the environment of a process, so that the sanitizers' runtime is loaded first."""
    runtimes = [
        subprocess.run(["gcc", f"-print-file-name={name}"], check=True, capture_output=True, text=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    options = "detect_leaks=0:abort_on_error=1:allocator_may_return_null=1"
    return {**os.environ, "LD_PRELOAD": " ".join(runtimes), "ASAN_OPTIONS": options}


_TESTS = """
import sys
from pathlib import Path
import pytest
from hookd.target.boot import native
image_of = native.image_of
native.image_of = lambda name: Path(sys.argv[1]).read_bytes() if name == "entry" else image_of(name)
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-W", "ignore:Module already imported", *sys.argv[2:]]))
"""


def tested(directory: Path, file: str, chosen: str) -> subprocess.CompletedProcess[str]:
    """Run tests of a file with the entry under the sanitizers.

    Args:
        directory: where the entry is compiled to.
        file: the file of the tests.
        chosen: the tests, as an expression for pytest's `-k`.

    Raises:
        OSError: as from `build`.
    """
    return subprocess.run(
        [sys.executable, "-c", _TESTS, build("entry", directory), file, "-k", chosen],
        env={**preloaded(), "PYTHONMALLOC": "malloc"}, cwd=REPOSITORY, capture_output=True, text=True, timeout=110,
        check=False,
    )  # fmt: skip
