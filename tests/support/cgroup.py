"""A cgroup with a limit of memory or of threads, of version 1 or 2, for tests that need the kernel to kill or to refuse."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.processes import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

_ALL = Path("/sys/fs/cgroup")
_LIMITS = {"memory": ("memory.limit_in_bytes", "memory.max"), "pids": ("pids.max", "pids.max")}
"""The files of version 1, below a folder of the controller's name, and of version 2."""


@contextlib.contextmanager
def limited(size: int, controller: str = "memory") -> Iterator[Path]:
    """Make a cgroup whose processes may have `size` bytes, or threads; write a pid to its `cgroup.procs` to put one there.

    The test is skipped where none can be made.
    """
    old, new = _LIMITS[controller]
    home, name = (_ALL / controller, old) if (_ALL / controller).is_dir() else (_ALL, new)
    group = home / f"hookd-test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
    except OSError as exc:
        pytest.skip(f"no cgroup can be made in {home}: {exc}")
    try:
        try:
            (group / name).write_text(str(size))
        except OSError as exc:
            pytest.skip(f"a cgroup of {home} has no limit of {controller}: {exc}")
        yield group
    finally:
        remove(group)


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Freeze a process, and let it go on; the test is skipped where that cannot be done."""
    old = (_ALL / "freezer").is_dir()
    home, name, (freeze, thaw) = (
        (_ALL / "freezer", "freezer.state", ("FROZEN", "THAWED")) if old else (_ALL, "cgroup.freeze", ("1", "0"))
    )
    group = home / f"hookd-test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
    except OSError as exc:
        pytest.skip(f"no cgroup can be made in {home}: {exc}")
    try:
        (group / "cgroup.procs").write_text(str(pid))
        (group / name).write_text(freeze)
        wait_until(lambda: (group / name).read_text().strip() == freeze, what="a frozen process")
        try:
            yield
        finally:
            (group / name).write_text(thaw)
            (home / "cgroup.procs").write_text(str(pid))
    finally:
        remove(group)


def remove(group: Path) -> None:
    """Remove a cgroup, which is busy as long as a process of it is about to end, whether it is listed or not."""
    wait_until(lambda: _removed(group), what="an empty cgroup")


def _removed(group: Path) -> bool:
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()
