"""Compile the kernel and the entry next to their sources.

There has to be a C compiler. This module imports nothing else of hookd's.

An installation runs this (hatch_build.py). In a source tree that is used through PYTHONPATH:

    python hookd/native/build.py

They are built for this kind of machine, by the compiler that CC names, else by that of the package `ziglang`, if it is
installed, else by the system's. `make dist` asks for one of MACHINES, which takes ziglang.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
SOURCES = {"kernel": ("kernel.c",), "entry": ("entry.c", "calls.c", "tensors.c", "graph.c", "spans.c", "notify.c")}
"""Source files by shared object."""
MACHINES = ("x86_64", "aarch64")
"""The kinds of machine for which ziglang compiles, named as by `uname -m`."""
FLAGS = ("-O3", "-shared", "-fPIC", "-s", "-std=gnu11", "-nostdlib", "-nostartfiles", "-ffreestanding",
         "-fno-stack-protector", "-fno-strict-aliasing", "-fno-math-errno", "-fvisibility=hidden")  # fmt: skip
"""The shared objects are linked to no library, so that one file works with glibc and musl.

The entry takes its symbols from the interpreter and from whichever libc is loaded.
"""
OF_SYSTEM = ("-fno-tree-loop-distribute-patterns", "-lgcc")
OF_ZIG = ("-fno-sanitize=undefined", "-Wno-unused-command-line-argument")
TIMEOUT_S = 120


class Compiler(NamedTuple):
    """A compiler for one kind of machine. It has a command, and the arguments that follow the sources."""

    machine: str
    command: tuple[str, ...]
    ending: tuple[str, ...]


def place(name: str, machine: str = os.uname().machine, directory: Path = HERE) -> Path:
    """Return the path of a shared object for a kind of machine. Machines are named as by `uname -m`."""
    return directory / f"{name}-{machine}.so"


def build(directory: Path = HERE, machine: str | None = None) -> list[Path]:
    """Compile the shared objects, and return their paths.

    Each file is replaced atomically: a concurrent reader gets the old one or the new one.

    Args:
        directory: where they are put.
        machine: one of MACHINES, to compile with ziglang for it, the same bytes on every machine; None: this kind of machine.

    Raises:
        OSError: there is no compiler, or it failed; the message is for a person. An installation continues without them.
    """
    compiler = _own() if machine is None else _of_ziglang(machine)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        made = [_compiled(compiler, name, Path(scratch)) for name in SOURCES]
        return [path.replace(directory / path.name) for path in made]


def has_compiler() -> bool:
    """Whether the system has a compiler for its own kind of machine."""
    return _of_system() is not None


def _own() -> Compiler:
    own, of_system = os.uname().machine, _of_system()
    if "CC" not in os.environ and own in MACHINES and _has_ziglang():
        return _of_ziglang(own)
    if of_system is None:
        raise FileNotFoundError("no C compiler found: install gcc, clang or ziglang, or set CC")
    return Compiler(own, tuple(shlex.split(of_system)), OF_SYSTEM)


def _of_ziglang(machine: str) -> Compiler:
    if machine not in MACHINES:
        raise ValueError(f"no wheel is made for {machine!r}; the machines are {' and '.join(MACHINES)}")
    if not _has_ziglang():
        raise FileNotFoundError("the package ziglang is not installed, which compiles for other kinds of machines")
    command = (sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-gnu.2.17")
    return Compiler(machine, command, OF_ZIG)


def _has_ziglang() -> bool:
    return importlib.util.find_spec("ziglang") is not None


def _of_system() -> str | None:
    return os.environ.get("CC") or next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)


def _compiled(compiler: Compiler, name: str, directory: Path) -> Path:
    made = place(name, compiler.machine, directory)
    sources = [str(HERE / source) for source in SOURCES[name]]
    command = [*compiler.command, *FLAGS, "-o", str(made), *sources, *compiler.ending]
    caches = dict.fromkeys(("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), str(directory))
    try:
        subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S, env={**caches, **os.environ}
        )
    except subprocess.SubprocessError as error:
        said = (getattr(error, "stderr", None) or str(error)).strip()
        raise OSError(f"{shlex.join(command)}: {said}") from error
    made.chmod(0o644)
    return made


if __name__ == "__main__":
    try:
        print(*build(), sep="\n")  # noqa: T201  # a script
    except OSError as error:
        sys.exit(f"the native libraries were not built; hookd uses torch operations and Python instead: {error}")
