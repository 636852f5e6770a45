"""Find the cgroup directories of a process, as far as our own mounts show them. Read-only."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from hookd.errors import HookdError
from hookd.tool.linux import proc

if TYPE_CHECKING:
    from collections.abc import Iterator

_MOUNTS = Path("/proc/self/mountinfo")


def folders(pid: int, controller: str) -> Iterator[Path]:
    """Yield the cgroups of a process that may have a controller ("memory", "pids"), its own before their parents.

    cgroup v1 comes before v2. Cgroups that our mounts do not show are left out.
    """
    try:
        lines = proc.read(pid, "cgroup").decode("utf-8", "surrogateescape").splitlines()
        mounts = _MOUNTS.read_text("utf-8", "surrogateescape").splitlines()
    except (OSError, HookdError):
        return
    parts = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    for kind, controller_field in (("cgroup", controller), ("cgroup2", "")):
        for _, controllers, path in parts:
            if controller_field in controllers.split(","):
                yield from _shown(mounts, kind, controller, path)


def _shown(mounts: list[str], kind: str, controller: str, path: str) -> Iterator[Path]:
    """Yield a cgroup and its parents below the first mount that shows the path."""
    for line in mounts:
        fields, _, tail = line.partition(" - ")
        words, after = fields.split(), tail.split()
        is_wanted = kind == "cgroup2" or (len(after) > 2 and controller in after[2].split(","))
        if len(words) < 5 or not after or after[0] != kind or not is_wanted:
            continue
        root, mount = (PurePosixPath(_plain(word)) for word in words[3:5])
        try:
            inner = PurePosixPath(path).relative_to(root)
        except ValueError:
            continue
        if ".." not in inner.parts:  # else outside of our own cgroup namespace
            yield from (Path(mount / group) for group in (inner, *inner.parents))
            return


def _plain(word: str) -> str:
    """Decode the octal escapes of mountinfo."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), word)
