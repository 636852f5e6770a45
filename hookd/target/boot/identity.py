"""The identity of this process, as the page publishes it."""

from __future__ import annotations

import platform
import posix
import pwd
import sys
from dataclasses import dataclass
from os import environ
from typing import TYPE_CHECKING, Any

from hookd.version import __version__
from hookd.wire import labels
from hookd.wire.descriptors import read
from hookd.wire.originals import clock
from hookd.wire.page import PROTOCOL

if TYPE_CHECKING:
    from hookd.wire.agent import AgentConfig
    from hookd.wire.identity import Identity


@dataclass
class Process:
    """The place of this process in its training job.

    Attributes:
        run: name of the training job.
        rank: number of the process in the job; torch.distributed may know it only after the attach.
        world_size: number of processes in the job; likewise.
        method: how the agent was started: attach, run or start.
        step_offset: steps of the training before the attach; None while unknown.
    """

    run: str
    rank: int
    world_size: int
    method: str
    step_offset: int | None

    @classmethod
    def of(cls, identity: Identity) -> Process:
        """Return the process that a page's identity describes."""
        return cls(
            identity["run"], identity["rank"], identity["world_size"], identity["method"], identity["step_offset"]
        )


def identity(config: AgentConfig) -> Identity:
    """Return the page's identity. `config` may override run and rank. Pids are those in the target's own namespace."""
    torch = sys.modules["torch"]
    script = sys.argv[0] if sys.argv else ""
    variables = dict(environ)
    run = config.get("run") or labels.given_run(variables)
    rank, world_size = ranks() or (int(labels.rank_label(variables)), labels.world_size(variables))
    return {
        "agent_version": __version__, "protocol": PROTOCOL, "pid": posix.getpid(), "ppid": posix.getppid(), "start_ticks": _start_ticks(),
        "started": _started(), "attached": clock.time(), "python": platform.python_version(),
        "torch": str(torch.__version__), "script": script,
        "run": run or labels.script_name(script), "is_named": bool(run),
        "rank": rank if (given := config.get("rank")) is None else given,
        "local_rank": labels.local_rank(variables), "world_size": world_size, "control": "",
        "method": config["method"], "uid": posix.getuid(), "user": _user(), "step_offset": 0 if config["method"] == "run" else None,
        "keep": config.get("lease_s") is None,
    }  # fmt: skip


def ranks() -> tuple[int, int] | None:
    """Return rank and world size from torch.distributed, None before its initialization.

    The environment may lack them: torch.multiprocessing.spawn passes them as arguments.
    """
    used = distributed()
    return None if used is None else (int(used.get_rank()), int(used.get_world_size()))


def distributed() -> Any:
    """Return torch.distributed once it is initialized, else None."""
    module: Any = getattr(sys.modules["torch"], "distributed", None)
    return module if module is not None and module.is_available() and module.is_initialized() else None


def _user() -> str:
    try:
        return pwd.getpwuid(posix.getuid()).pw_name
    except KeyError:
        return str(posix.getuid())


def _start_ticks() -> int:
    """Return the start time in ticks, field 22 of /proc/self/stat. 0 in a container without /proc."""
    try:
        # The name in field 2 may contain any character, including spaces and parentheses. An emulator (qemu-user) answers itself
        # for /proc/self/stat, with a start that may be a tick later than the one that other processes read.
        return int(read("/proc/self/./stat").rpartition(b")")[2].split()[19])
    except OSError:
        return 0


def _started() -> float:
    try:
        uptime_s = float(read("/proc/uptime").split()[0])
    except OSError:
        return clock.time()
    return clock.time() - uptime_s + _start_ticks() / posix.sysconf("SC_CLK_TCK")
