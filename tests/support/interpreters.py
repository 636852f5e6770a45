"""The Pythons of this machine that a target or a tool can run on, and what each of them is.

They are found on PATH, below `~/.pyenv/versions`, and where HOOKD_COMPAT_PYTHONS (paths) and HOOKD_COMPAT_ROOTS (roots of
other file systems with an /opt/v/bin/python, else a /usr/bin/python3 of their own, entered with chroot) name more; both are
separated by colons.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.environment import bare_python, target_environment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from _pytest.mark.structures import ParameterSet

HERE = Path("/")
VERSIONS = ((3, 10), (3, 11), (3, 12), (3, 13), (3, 14), (3, 15))
"""The minor versions of CPython that hookd attaches to."""
WHAT = """
import importlib.util, json, os, re, sys, sysconfig
found = importlib.util.find_spec("torch")
text = open(os.path.join(os.path.dirname(found.origin), "version.py")).read() if found and found.origin else ""
torch = re.search(r"__version__ = '([^']+)'", text)
free = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
shared = any("libpython" in line for line in open("/proc/self/maps"))
print(json.dumps([list(sys.version_info[:3]), sys.implementation.name, sys.executable, shared, free,
                  torch and torch.group(1)]))
"""


@dataclass(frozen=True)
class Interpreter:
    """A Python.

    Attributes:
        path: as it is called below its root.
        root: of its file system; "/" for this one.
        is_shared: libpython is a library of its own, not part of the executable.
        torch: the version of its torch, None where it has none.
    """

    path: str
    root: Path
    version: tuple[int, int, int]
    is_shared: bool
    is_free_threaded: bool
    torch: str | None

    @property
    def command(self) -> list[str]:
        """Return what starts it."""
        return [self.path] if self.root == HERE else ["chroot", str(self.root), self.path]

    @contextlib.contextmanager
    def directory(self) -> Iterator[Path]:
        """Make a directory in its /tmp, as we see it, and remove it at the end."""
        with tempfile.TemporaryDirectory(dir=self.root / "tmp", prefix="compat-") as name:
            Path(name).chmod(0o755)
            yield Path(name)

    def inside(self, path: Path) -> Path:
        """Return a path as it sees it."""
        return HERE / path.relative_to(self.root)

    @property
    def minor(self) -> tuple[int, int]:
        return self.version[:2]

    def __str__(self) -> str:
        build = "shared" if self.is_shared else "static"
        where = "" if self.root == HERE else f" in {self.root.name}"
        version = ".".join(map(str, self.version)) + "t" * self.is_free_threaded
        return f"{version} {build}{where}" + (f" torch {self.torch}" if self.torch else "")


@functools.cache
def found() -> tuple[Interpreter, ...]:
    """Return all that hookd may attach to, each build once, in the order of versions; that of the tests' targets too."""
    known: dict[tuple[Path, str, bool], Interpreter] = {}
    for path, root in _candidates():
        one = at(path, root)
        if one is not None:
            known.setdefault((root, _executable(one), one.torch is not None), one)
    return tuple(sorted(known.values(), key=lambda one: (one.version, str(one.root), one.torch or "")))


def roots() -> list[str]:
    """Return the other roots that were named."""
    return _listed("HOOKD_COMPAT_ROOTS")


def no_roots() -> ParameterSet:
    """Return the parameter of a test if no interpreter was named: it skips the test, and says what is missing."""
    text = "HOOKD_COMPAT_ROOTS names no root of another file system with a /usr/bin/python3 and torch: untested"
    return pytest.param("", id="another-root", marks=pytest.mark.skip(reason=text))


def with_torch(where: str) -> Interpreter:
    """Return the Python with torch "here", where the tests' targets live, or of another root."""
    one = at(str(bare_python())) if where == "here" else at(python_of(Path(where)), Path(where))
    assert one is not None, f"{where} has no Python that hookd attaches to"
    assert one.torch is not None, f"{where} has no torch"
    return one


def _candidates() -> Iterator[tuple[str, Path]]:
    yield str(bare_python()), HERE
    for major, minor in VERSIONS:
        path = shutil.which(f"python{major}.{minor}", path=os.environ.get("PATH", "") + ":/usr/bin")
        if path:
            yield path, HERE
    yield "/usr/bin/python3", HERE
    yield from ((str(path), HERE) for path in sorted(Path.home().glob(".pyenv/versions/*/bin/python")))
    yield from ((path, HERE) for path in _listed("HOOKD_COMPAT_PYTHONS"))
    yield from ((python_of(Path(root)), Path(root)) for root in roots())


def python_of(root: Path) -> str:
    """Return the Python of another root that has torch: a virtual environment's, or the system's own."""
    return next((path for path in ("/opt/v/bin/python",) if os.path.lexists(f"{root}{path}")), "/usr/bin/python3")


def _listed(variable: str) -> list[str]:
    return [one for one in os.environ.get(variable, "").split(":") if one]


def _executable(one: Interpreter) -> str:
    """Return the file behind the links of virtual environments."""
    return one.path if one.root != HERE else os.path.realpath(one.path)


def at(path: str, root: Path = HERE) -> Interpreter | None:
    """Describe a Python; return None if it cannot be started, and for versions to which hookd does not attach."""
    start = [path] if root == HERE else ["chroot", str(root), path]
    try:
        done = subprocess.run(
            [*start, "-c", WHAT], capture_output=True, text=True, timeout=60, check=True, env=target_environment()
        )
    except (OSError, subprocess.SubprocessError):
        return None
    version, name, executable, shared, free, torch = json.loads(done.stdout)
    if name != "cpython" or tuple(version[:2]) not in VERSIONS:
        return None
    return Interpreter(executable, root, tuple(version), shared, free, torch)
