"""Find the Python processes that a launcher has started."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING

import psutil

from hookd.errors import HookdError, NoSuchTarget
from hookd.tool.attach import discover, environment
from hookd.tool.linux import proc

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookd.tool.attach.discover import Candidate

_PORTS = ("SLURM_STEP_LAUNCHER_PORT", "SLURM_SRUN_COMM_PORT")


def members(pid: int) -> list[Candidate]:
    """Return the Python processes among a process and its descendants, including those that cannot train.

    The tasks of Slurm's srun descend from the node's slurmd; they are identified by the port on which their srun listens.

    Raises:
        NoSuchTarget: there is no such process.
    """
    try:
        family = _family(psutil.Process(pid))
        for step in [process for process in family if _name(process) == "srun"]:
            family += [member for task in _tasks(step) for member in _family(task) if member not in family]
    except psutil.NoSuchProcess as exc:
        raise NoSuchTarget(f"there is no process {pid}", hint="`hookd ps` lists training processes.") from exc
    return [candidate for process in family if (candidate := discover.inspect(process.pid)) is not None]


def above(pid: int) -> list[int]:
    """Return the pids of a process's ancestors, nearest first; empty if the process is gone."""
    try:
        return [parent.pid for parent in psutil.Process(pid).parents()]
    except psutil.Error:
        return []


def _family(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def _name(process: psutil.Process) -> str:
    return PurePath(proc.link(process.pid, "exe")).name


def _tasks(srun: psutil.Process) -> Iterator[psutil.Process]:
    """Yield the processes on this node that an srun has started.

    Source: Slurm's src/api/step_launch.c sets the variables for each task.
    """
    try:
        connections = srun.net_connections("tcp")
        ports = {str(connection.laddr.port) for connection in connections if connection.status == psutil.CONN_LISTEN}
    except psutil.Error:
        return
    for process in psutil.process_iter():
        try:
            if ports & _ports_of(process.pid) and not ports & _ports_of(process.ppid()):
                yield process
        except psutil.NoSuchProcess:
            continue


def _ports_of(pid: int) -> set[str]:
    try:
        environ = environment.of(pid) or {}
    except (HookdError, OSError):
        return set()
    return {environ[name] for name in _PORTS if name in environ}
