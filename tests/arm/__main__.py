"""`make arm`: hookd on 64-bit ARM, on a machine of another kind.

    sudo python -m tests.arm --root DIR [--only tests|wheel] [pytest's arguments]

Makes a Debian root (see `root.py`) unless it is there, compiles the shared objects for it by `ziglang`, and runs under qemu-user:
the tests that need no ptrace, with the entry and the kernel of the wheel; and the wheel itself, by `hookd run` and `hookd.start()`.
"""

from __future__ import annotations

import argparse
import runpy
import shutil
import sys
from pathlib import Path

from tests.arm import enter, root

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = "/src"
SUITES = (
    "tests/unit/test_attach_aarch64.py", "tests/unit/test_kernel_bits.py", "tests/unit/test_order.py", "tests/unit",
    "tests/integration/test_agent_*.py", "tests/integration/test_digests.py", "tests/integration/test_fingerprint_device.py",
    "tests/integration/test_hookspecs.py", "tests/integration/test_native_build.py", "tests/integration/test_observe.py",
)  # fmt: skip
TIMEOUT_S = 1800
_TRAINING = "/arm/training.py"
_INSTALL = (
    "rm -rf /tmp/wheel && python3 -m venv --system-site-packages --without-pip /tmp/wheel && "
    f"python3 -m pip install --quiet --no-deps --no-index --target /tmp/wheel/lib/python{root.MINOR}/site-packages /wheels/*aarch64.whl"
)
# The same loss to the bit, plain and with an agent; with one, the training fails unless entry and kernel are loaded.
_USE = (
    f"cd /tmp && plain=$(wheel/bin/python {_TRAINING} plain) && started=$(wheel/bin/python {_TRAINING} start) && "
    f"run=$(wheel/bin/python -m hookd run -- wheel/bin/python {_TRAINING} run) && "
    'echo "plain: $plain" && echo "hookd.start(): $started" && echo "hookd run: $run" && '
    'test "$plain" = "$started" && test "$plain" = "$run"'
)


def main() -> int:
    """Run what was asked for; return 0 if all passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.arm", description=__doc__.partition("\n")[0])
    parser.add_argument("--root", type=Path, required=True, help="the Debian root; it is made unless it is there")
    parser.add_argument("--only", choices=("tests", "wheel"), help="leave out the other part")
    options, arguments = parser.parse_known_args()
    place: Path = options.root.resolve()
    root.make(place)
    status = 0
    if options.only != "wheel":
        status |= _tests(place, arguments)
    if options.only != "tests":
        status |= _wheel(place)
    return status


def _tests(place: Path, arguments: list[str]) -> int:
    copy = place / SOURCES.lstrip("/")
    shutil.rmtree(copy, ignore_errors=True)  # a copy: what is compiled and written there stays there
    shutil.copytree(REPOSITORY, copy, symlinks=True, ignore=_left_out)
    runpy.run_path(str(REPOSITORY / "hookd" / "native" / "build.py"))["build"](copy / "hookd" / "native", "aarch64")
    suites = [arguments.pop(0) for _ in list(arguments) if arguments and not arguments[0].startswith("-")] or list(
        SUITES
    )
    pytest = f"python3 -m pytest -p no:cacheprovider -p no:xdist --timeout {TIMEOUT_S} --tb short"
    installed = "python3 -m pip install --quiet --break-system-packages --no-deps --no-index --no-build-isolation -e ."
    text = f"cd {SOURCES} && {installed} && {pytest} {' '.join([*suites, *arguments])}"
    return enter.enter(place, ["/bin/sh", "-c", text])


def _left_out(directory: str, names: list[str]) -> set[str]:
    """Return what of a directory is of this machine, and not a source."""
    made = {"build", "dist"} if Path(directory) == REPOSITORY else set()
    return {*made, *shutil.ignore_patterns(".git", ".venv", "__pycache__", ".hypothesis", "*.so")(directory, names)}


def _wheel(place: Path) -> int:
    if not list((REPOSITORY / "dist").glob("*aarch64.whl")):
        sys.exit("there is no wheel: `make dist` makes it")
    binds = {REPOSITORY / "dist": "/wheels", REPOSITORY / "tests" / "arm": "/arm"}
    return enter.enter(place, ["/bin/sh", "-c", f"{_INSTALL} && {_USE}"], binds)


if __name__ == "__main__":
    sys.exit(main())
