"""Who this process is: what the page says of it to a reader. Runs in the target."""

from __future__ import annotations

import platform
import posix
import pwd
import sys
from dataclasses import dataclass
from os import environ
from typing import Any

from hookd.version import __version__
from hookd.wire import labels
from hookd.wire.descriptors import read
from hookd.wire.originals import clock
from hookd.wire.page import PROTOCOL


@dataclass
class Process:
    """This process among those of its training.

    Attributes:
        run: the training job.
        rank: which process of the job it is. torch.distributed may tell that later than the agent comes.
        world_size: how many processes the job has; likewise.
        method: how the agent came: attach, run or start.
    """

    run: str
    rank: int
    world_size: int
    method: str

    @classmethod
    def of(cls, identity: dict[str, Any]) -> Process:
        """Take it from the page's identity."""
        return cls(identity["run"], identity["rank"], identity["world_size"], identity["method"])


def identity(config: dict[str, Any]) -> dict[str, Any]:
    """Give the page's identity; `config` may override run and rank. Pids are those of the target's own namespace."""
    torch = sys.modules["torch"]
    script = sys.argv[0] if sys.argv else ""
    variables = dict(environ)
    rank, world_size = ranks() or (int(labels.rank_label(variables)), labels.world_size(variables))
    return {
        "agent_version": __version__, "protocol": PROTOCOL, "pid": posix.getpid(), "ppid": posix.getppid(), "start_ticks": _start_ticks(),
        "started": _started(), "attached": clock.time(), "python": platform.python_version(),
        "torch": str(torch.__version__), "script": script,
        "run": config.get("run") or labels.run_label(variables, script),
        "rank": rank if config.get("rank") is None else int(config["rank"]),
        "local_rank": labels.local_rank(variables), "world_size": world_size, "control": "",
        "method": config["method"], "uid": posix.getuid(), "user": _user(), "step_offset": None,
        "keep": config.get("lease_s") is None,
    }  # fmt: skip


def ranks() -> tuple[int, int] | None:
    """Give rank and world size as torch.distributed has them; None before its initialization, or without it.

    They need not stand in the environment: torch.multiprocessing.spawn hands them over as arguments.
    """
    distributed: Any = getattr(sys.modules["torch"], "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return int(distributed.get_rank()), int(distributed.get_world_size())


def _user() -> str:
    try:
        return pwd.getpwuid(posix.getuid()).pw_name
    except KeyError:
        return str(posix.getuid())


def _start_ticks() -> int:
    """Give field 22 of /proc/self/stat; 0 in a container without /proc."""
    try:
        # The name in field 2 may hold anything, also spaces and parentheses.
        return int(read("/proc/self/stat").rpartition(b")")[2].split()[19])
    except OSError:
        return 0


def _started() -> float:
    try:
        uptime_s = float(read("/proc/uptime").split()[0])
    except OSError:
        return clock.time()
    return clock.time() - uptime_s + _start_ticks() / posix.sysconf("SC_CLK_TCK")
