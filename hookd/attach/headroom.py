"""Whether a process may have the memory that an agent takes: one that has not is killed for ours. Tool side, read-only.

A page that an attach touches counts for the memory cgroup of the target. Where that is at its limit, and nothing can be
reclaimed, the kernel kills a process of the cgroup: the training.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from hookd.attach import proc
from hookd.errors import AttachError

if TYPE_CHECKING:
    from collections.abc import Iterator

NEEDED = 48 << 20
"""An agent with the default plugins takes 20 to 30 MiB, most of it while its modules are imported."""
_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
_FILES = {_V1: ("memory.usage_in_bytes", "memory.limit_in_bytes"), _V2: ("memory.current", "memory.max")}
_RECLAIMABLE = ("inactive_file", "active_file", "total_inactive_file", "total_active_file")


def require(pid: int) -> None:
    """Check that the memory cgroups of a process leave room for an agent, as far as they can be seen.

    Raises:
        AttachError: reason "no-memory".
    """
    left = min(_left(pid), default=NEEDED)
    if left < NEEDED:
        raise AttachError(
            f"the memory cgroup of process {pid} has {max(0, left) >> 20} MiB left, and an agent takes up to "
            f"{NEEDED >> 20} MiB: the kernel could kill the training", reason="no-memory",
            hint="Raise the limit of its container or job, or start it with `hookd run -- ...`.",
        )  # fmt: skip


def _left(pid: int) -> Iterator[int]:
    """Yield how much more memory each cgroup above a process may have."""
    lines = proc.read(pid, "cgroup").decode("utf-8", "replace").splitlines()
    paths = {
        controllers: path for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2)
    }
    for home, controller in ((_V1, "memory"), (_V2, "")):
        path = paths.get(controller, "/")
        if ".." in path.split("/"):  # outside of our own cgroup namespace
            continue
        group = home / path.strip("/")
        while group != home:
            with contextlib.suppress(OSError, ValueError):
                yield _left_in(group, *_FILES[home])
            group = group.parent


def _left_in(group: Path, usage: str, limit: str) -> int:
    """Return the room of one cgroup; pages of files can be dropped.

    Raises:
        OSError: it is not there.
        ValueError: it has no limit.
    """
    most, used = int((group / limit).read_text()), int((group / usage).read_text())
    pairs = (line.split() for line in (group / "memory.stat").read_text().splitlines())
    counts = {pair[0]: pair[1] for pair in pairs if len(pair) == 2}
    names = _RECLAIMABLE[2:] if "total_inactive_file" in counts else _RECLAIMABLE[:2]
    return most - used + sum(int(counts.get(name, 0)) for name in names)
