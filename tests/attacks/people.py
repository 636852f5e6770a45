"""Processes of the users on both sides of an attack."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import site
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.environment import REPOSITORY, once, tool_environment
from tests.support.processes import Process

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

APART = ("unshare", "--user", "--mount", "--map-root-user")
"""A prefix that starts a command as root of a user namespace of its own, as any user may."""


@contextlib.contextmanager
def process_of(
    uid: int, command: Sequence[str | Path], *, pass_fds: tuple[int, ...] = (), **environment: str | Path
) -> Iterator[Process]:
    """Start a process of a user without supplementary groups; its stdin takes lines, and it inherits `pass_fds`."""
    popen = functools.partial(subprocess.Popen, user=uid, group=uid, extra_groups=(), pass_fds=pass_fds)
    with Process(command, env=tool_environment(**environment), cwd=Path("/"), stdin=True, popen=popen) as process:
        yield process


def start_as(uid: int, command: Sequence[str | Path], **environment: str) -> Process:
    """Start a process of a user with a nearly empty environment; the caller ends it."""
    popen = functools.partial(subprocess.Popen, user=uid, group=uid, extra_groups=())
    return Process(command, env={"PATH": "/usr/bin:/bin", **environment}, popen=popen)


@contextlib.contextmanager
def folder_of(uid: int, mode: int = 0o755) -> Iterator[Path]:
    """Make a directory of a user that others can enter."""
    path = Path(tempfile.mkdtemp(prefix="attack-"))
    try:
        os.chown(path, uid, uid)
        path.chmod(mode)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def admit(*paths: Path) -> None:
    """Make directories below root's private ones accessible to every user, in this mount namespace only."""
    mounts = {}
    for path in paths:
        closed = next((parent for parent in reversed(path.parents) if not parent.stat().st_mode & 0o001), None)
        if closed is not None:
            mounts[path] = closed, tempfile.mkdtemp(prefix="attack-")
            subprocess.run(["mount", "--bind", path, mounts[path][1]], check=True)
    for closed in {closed for closed, _ in mounts.values()}:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", closed], check=True)
    for path, (_, place) in mounts.items():
        path.mkdir(parents=True)
        subprocess.run(["mount", "--move", place, path], check=True)
        Path(place).rmdir()


@once
def python_of_users() -> Path:
    """Return a Python with torch that every user can run: ours may be in root's home directory.

    It is mounted in `/run` of the attacks' mount namespace. It needs the environment that `of_users` returns.
    """
    place = Path("/run/python")
    place.mkdir()
    subprocess.run(["mount", "--bind", sys.base_prefix, place], check=True)
    return place / "bin" / Path(os.path.realpath(sys.executable)).name


def of_users() -> dict[str, str]:
    """Return the environment in which that Python finds its own library, torch and hookd."""
    places = [str(REPOSITORY), str(REPOSITORY / "plugins"), site.getsitepackages()[0]]
    return {"PYTHONPATH": os.pathsep.join(places), "LD_LIBRARY_PATH": "/run/python/lib"}
