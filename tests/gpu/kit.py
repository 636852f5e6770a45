"""Fill build/gpu-kit with what `make gpu` needs beside the checkout, torch and numpy: for a machine with a GPU, without hookd and a registry.

    python -m tests.gpu.kit [--python 3.12] [--machine x86_64]

The kit has hookd's dependencies in the versions of the container image, pytest, hookd's metadata (by which it finds its plugins), and its
shared objects, compiled here. The code is that of the checkout.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from hookd.native import build

ROOT = Path(__file__).parents[2]
KIT = ROOT / "build/gpu-kit"
LOCKED = ROOT / "deploy/docker/requirements.txt"
TESTS = ("jsonschema>=4.20", "pytest>=8.2", "pytest-timeout>=2.3", "hypothesis>=6.100", "xxhash>=3.4")
"""What the tests import beside it; tests of what is not here are skipped."""
LIBC = ("manylinux_2_28", "manylinux_2_17", "manylinux2014")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", help="the version of CPython there, by default 3.12")
    parser.add_argument(
        "--machine", default=platform.machine(), choices=build.MACHINES, help="another one than this takes ziglang"
    )
    given = parser.parse_args()
    shutil.rmtree(KIT, ignore_errors=True)
    _install(given, "--no-deps", "--require-hashes", "--requirement", str(LOCKED))
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as versions:
        versions.write("\n".join(re.findall(r"^[\w.-]+==[^\\]+", LOCKED.read_text(), re.MULTILINE)))
        versions.flush()
        _install(given, "--constraint", versions.name, *TESTS)
    native = KIT / "native"
    native.mkdir()
    build.build(native, None if given.machine == platform.machine() else given.machine)
    _metadata()
    size = sum(file.stat().st_size for file in KIT.rglob("*") if file.is_file())
    print(f"{KIT.relative_to(ROOT)}: {size >> 20} MiB, for CPython {given.python} on {given.machine}")


def _install(given: argparse.Namespace, *words: str) -> None:
    """Unpack wheels for the interpreter and the machine there."""
    platforms = [word for libc in LIBC for word in ("--platform", f"{libc}_{given.machine}")]
    subprocess.run(
        [
            sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", "--upgrade", "--target", KIT,
            "--only-binary=:all:", "--implementation", "cp", "--python-version", given.python, *platforms, *words,
        ],
        check=True,
    )  # fmt: skip


def _metadata() -> None:
    """Unpack the metadata of hookd's own wheel."""
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(
            [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", scratch, ROOT], check=True
        )
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            wheel.extractall(KIT, [name for name in wheel.namelist() if ".dist-info/" in name])


if __name__ == "__main__":
    main()
