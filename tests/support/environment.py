"""A virtual environment that has this one's torch and nothing of hookd: where the targets of the tests live."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import threading
import venv
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeVar

    T = TypeVar("T")

REPOSITORY = Path(__file__).resolve().parents[2]
TARGETS = REPOSITORY / "tests" / "targets"
REPORTS = REPOSITORY / "tests" / "e2e" / "reports"
WORKLOADS = REPOSITORY.parent / "shared" / "workloads"


def once(make: Callable[[], T]) -> Callable[[], T]:
    """Make something at the first call and return the same ever after, also to threads that ask for it meanwhile."""
    lock = threading.Lock()
    cached = functools.cache(make)

    @functools.wraps(make)
    def made() -> T:
        with lock:
            return cached()

    return made


BARE = "bare-env-"
"""How the name of the targets' environment begins."""


@once
def bare_python() -> Path:
    """Return the interpreter of a new environment that holds torch, numpy and their dependencies, as links.

    It lives as long as the test run. hookd, pluggy and pytest cannot be imported there, which is checked.
    """
    home = Path(_keep(tempfile.TemporaryDirectory(prefix=BARE)).name)
    venv.EnvBuilder(symlinks=True).create(home)
    site = home / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    for source in {*_files_of({"torch", "numpy", "expecttest"})}:  # several of torch have a folder in common
        (site / source.name).symlink_to(source)
    python = home / "bin" / "python"
    # Found, not imported: torch takes seconds, and each worker makes an environment.
    found = (
        "from importlib.util import find_spec as f; print([m for m in ('torch', 'numpy', 'hookd', 'pluggy') if f(m)])"
    )
    done = subprocess.run(
        [python, "-c", found], check=True, timeout=120, env=target_environment(), cwd=home, stdout=subprocess.PIPE
    )
    assert done.stdout == b"['torch', 'numpy']\n", done.stdout
    return python


def target_environment(**extra: str | Path) -> dict[str, str]:
    """Return the environment variables of a process that knows nothing of hookd."""
    return _without_python_and_hookd() | {k: str(v) for k, v in extra.items()}


def tool_environment(**extra: str | Path) -> dict[str, str]:
    """Return those of a `hookd` command: PYTHONPATH stays only where hookd is not installed but run from its tree."""
    try:
        importlib.metadata.distribution("hookd")
        path = {}
    except importlib.metadata.PackageNotFoundError:
        path = {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "plugins")])}
    scope = {"HOOKD_SCOPE": os.environ["HOOKD_SCOPE"]} if "HOOKD_SCOPE" in os.environ else {}
    return _without_python_and_hookd() | path | scope | _places() | {k: str(v) for k, v in extra.items()}


@once
def _places() -> dict[str, str]:
    """Keep a daemon inside a command (of `run`, of `attach`) away from the default places, where a real one may be."""
    state = _keep(tempfile.TemporaryDirectory(prefix="hookd-state-"))
    return {"HOOKD_LISTEN": "127.0.0.1:0", "HOOKD_STATE_DIR": state.name}


def _without_python_and_hookd() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "HOOKD_", "TORCH", "COV_"))}
    return kept | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


def _files_of(names: set[str]) -> Iterator[Path]:
    """Yield the top-level entries in site-packages of some distributions and of all that they need."""
    for name in _closure(names):
        distribution = importlib.metadata.distribution(name)
        if distribution.files is None:  # Debian's packages of Python's packages list no files
            listed = (distribution.read_text("top_level.txt") or name.replace("-", "_")).split()
            places = [Path(str(distribution.locate_file(top + end))) for top in listed for end in ("", ".py")]
            yield from (place for place in places if place.exists())
            continue
        tops = {file.parts[0] for file in distribution.files or () if file.parts[0] not in {"..", "__pycache__"}}
        for top in sorted(tops):
            yield Path(str(distribution.locate_file(top)))


def _closure(names: set[str]) -> set[str]:
    found: set[str] = set()
    waiting = set(names)
    while waiting:
        found.add(name := waiting.pop())
        needs = map(Requirement, importlib.metadata.requires(name) or ())
        waiting |= {need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})} - found
    return found


_kept: list[tempfile.TemporaryDirectory[str]] = []


def _keep(directory: tempfile.TemporaryDirectory[str]) -> tempfile.TemporaryDirectory[str]:
    """Hold a temporary directory until the interpreter ends, which removes it."""
    _kept.append(directory)
    return directory
