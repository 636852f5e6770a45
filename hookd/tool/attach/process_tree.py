"""What a launcher has started: the Python processes below a process, and which of them train. Tool side."""

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
    """Give the Python processes among a process and all that it has started, those that cannot train too.

    The tasks of Slurm's srun descend from the node's slurmd; they are told by the port on which their srun listens.

    Raises:
        NoSuchTarget: there is no such process.
    """
    try:
        family = _family(psutil.Process(pid))
        for step in [one for one in family if _name(one) == "srun"]:
            family += [member for task in _tasks(step) for member in _family(task) if member not in family]
    except psutil.NoSuchProcess as exc:
        raise NoSuchTarget(f"there is no process {pid}", hint="`hookd ps` lists training processes.") from exc
    return [found for one in family if (found := discover.inspect(one.pid)) is not None]


def above(pid: int) -> list[int]:
    """Give the pids of the processes that a process descends from, the nearest first; none where it has gone."""
    try:
        return [one.pid for one in psutil.Process(pid).parents()]
    except psutil.Error:
        return []


def _family(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def _name(process: psutil.Process) -> str:
    return PurePath(proc.link(process.pid, "exe")).name


def _tasks(srun: psutil.Process) -> Iterator[psutil.Process]:
    """Give the processes on this node that a srun has started.

    Source: Slurm's src/api/step_launch.c sets the variables for each task.
    """
    try:
        ports = {str(one.laddr.port) for one in srun.net_connections("tcp") if one.status == psutil.CONN_LISTEN}
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
