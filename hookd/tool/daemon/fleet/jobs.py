"""Tell a training job from every other one, on any machine.

Most jobs have no name but that of their script, and `train.py` is the name of half of them. What all ranks of a job have in common,
and no other job has, is hashed into a tag: `train.py@3fa29b1c`. Each daemon computes it alone, from what the kernel and the
environment of a rank say, so that the daemons of all nodes of a job agree without talking to each other.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from hookd.errors import HookdError
from hookd.tool.attach import container, process_snapshot
from hookd.tool.daemon.incidents.store import boot_id
from hookd.tool.linux import commandline, proc
from hookd.wire import labels

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hookd.tool.attach.process_snapshot import Snapshot

_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_SHELLS = ("sh", "bash", "dash", "ash", "ksh", "zsh")
_LOCAL_RANK = "LOCAL_RANK"
_ELASTIC = "TORCHELASTIC_RUN_ID"
_LOCAL_SIZES = (("LOCAL_WORLD_SIZE", "WORLD_SIZE"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"))
"""Variables of torchrun and Open MPI: the number of ranks on this node, and in the job."""
_MOST_CHILDREN = 64
"""Children of a process that are looked at."""
_MOST_WRAPPERS = 8
"""Limit on the processes between a rank and its launcher: shells, numactl, a profiler."""


@dataclass(frozen=True)
class Job:
    """A training job, as each of its ranks shows it.

    Attributes:
        tag: `labels.TAG` hexadecimal digits, the same for all ranks of the job on all nodes, and for no other job.
        launcher: pid of the process that started its ranks on this node; of a single process its own.
        is_shared: whether ranks of other launchers can have the same tag.
    """

    tag: str
    launcher: int
    is_shared: bool = False


def of(pid: int, seen: Snapshot | None, world_size: int) -> Job:
    """Return the job of a process.

    Args:
        pid: of the process.
        seen: the process; None if it has gone.
        world_size: number of ranks in its job, 1 for a single process.
    """
    if seen is None:
        return Job(_tag(boot_id(), pid), pid)
    launcher, is_of_one_node = _launcher(seen), _is_of_one_node(seen.environ)
    if world_size == 1 and (launcher is None or not is_of_one_node):
        return Job(_started_by(seen), pid)
    above = launcher.pid if launcher is not None else seen.ppid
    if launcher is not None and is_of_one_node and not labels.is_uuid(seen.environ.get(_ELASTIC, "")):
        return Job(_started_by(launcher), above)
    if place := _meeting(seen, launcher):
        return Job(_tag(*place), above, is_shared=True)
    # A program may start several jobs, each with a port of its own.
    port = seen.environ.get("MASTER_PORT", "") if _rank_variable(seen) is not None else ""
    tag = _started_by(launcher, above)
    return Job(_tag(tag, port) if port else tag, above)


def _meeting(seen: Snapshot, launcher: Snapshot | None) -> tuple[object, ...]:
    """Return what identifies the place where the ranks of a job meet, an empty tuple if only their launcher does."""
    environ = seen.environ
    address, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if labels.is_uuid(elastic := environ.get(_ELASTIC, "")):
        return ("torchrun", elastic.strip().lower())
    if address and port and not _is_loopback(address):
        # Two namespaces of Kubernetes may have services of one name.
        return ("network", container.where("", environ).namespace, address.lower(), port)
    if namespace := environ.get("PMIX_NAMESPACE", ""):
        return ("mpirun", namespace)
    if address and port and (launcher is None or not _is_python(launcher)):
        # Ranks that were started by hand, each from its own shell. 127.0.0.1 is another place in each network namespace.
        return ("node", boot_id(), seen.network, seen.uid, port)
    return ()


def _started_by(seen: Snapshot | None, pid: int = 0) -> str:
    """Return the tag of a job that one process has started, or is.

    The pid is that of the innermost namespace, so that daemons inside and outside of a container agree. A container of a pod that
    the kubelet starts anew goes on with its job, so its main process counts as the pod.
    """
    if seen is None:
        return _tag(boot_id(), pid)
    try:
        inner, cgroup = proc.status(seen.pid).nspid, proc.read(seen.pid, "cgroup")
    except (HookdError, OSError):
        inner, cgroup = seen.pid, b""
    pod = container.pod_uid(cgroup.decode("utf-8", "replace")) if inner == 1 else ""
    started = seen.start_ticks - proc.boot_offset_ticks(os.getpid())
    return _tag("pod", pod) if pod else _tag(boot_id(), proc.link(seen.pid, "ns/pid"), inner, started)


def _launcher(seen: Snapshot) -> Snapshot | None:
    """Return the process that started a rank; None if it has gone or is hidden.

    That is the next process above it that does not have its rank: what lies between them (a shell script, numactl) has inherited
    the rank, or is a shell that has set it. A process without a rank in its environment may have been started by its own program (multiprocessing), or it has
    started the others itself (Lightning).
    """
    if _rank_variable(seen) is None:
        return _above_in_program(seen) or (seen if _starts_ranks(seen) else _above(seen))
    for _ in range(_MOST_WRAPPERS):
        above = _above(seen)
        # torchrun itself may have been given a rank.
        if (
            above is None
            or not (_has_its_rank(above, seen) or _is_wrapper(above))
            or commandline.is_launcher(above.cmdline)
        ):
            return above
        seen = above
    return None


def _has_its_rank(above: Snapshot, seen: Snapshot) -> bool:
    """Whether a process has the rank of another one, by any of the variables that both have."""
    return any(seen.environ[name] == above.environ.get(name) for name in _RANKS if name in seen.environ)


def _is_wrapper(above: Snapshot) -> bool:
    """Whether a process is a shell that runs one command, such as `sh -c 'export RANK=$N; python train.py'`."""
    name, *arguments = above.cmdline or ("",)
    if PurePath(name).name not in _SHELLS or "-c" not in arguments[:1]:
        return False
    with contextlib.suppress(HookdError, OSError):
        return len(proc.read(above.pid, f"task/{above.pid}/children").split()) == 1
    return False


def _above_in_program(seen: Snapshot) -> Snapshot | None:
    """Return the process of the same program that has started this one, None if it was started from elsewhere."""
    above = _above(seen)
    if above is not None and "multiprocessing.forkserver" in " ".join(above.cmdline):
        return _above(above)
    is_spawned = "multiprocessing.spawn" in " ".join(seen.cmdline)
    is_same = above is not None and commandline.program(above.cmdline) == commandline.program(seen.cmdline) != (
        "",
        False,
    )
    return above if is_spawned or is_same else None


def _starts_ranks(seen: Snapshot) -> bool:
    """Whether a process has given a rank to a child that runs the same program."""
    if _LOCAL_RANK in seen.environ:
        return False
    with contextlib.suppress(HookdError, OSError, LookupError, ValueError):
        for child in proc.read(seen.pid, f"task/{seen.pid}/children").split()[:_MOST_CHILDREN]:
            below = process_snapshot.take(int(child), settles=False)
            if _LOCAL_RANK in below.environ and commandline.program(below.cmdline) == commandline.program(seen.cmdline):
                return True
    return False


def _rank_variable(seen: Snapshot) -> str | None:
    return next((name for name in _RANKS if name in seen.environ), None)


def _above(seen: Snapshot) -> Snapshot | None:
    if seen.ppid <= 1:
        return None
    try:
        return process_snapshot.take(seen.ppid, settles=False)
    except (HookdError, OSError, LookupError, ValueError):
        return None


def _is_python(launcher: Snapshot) -> bool:
    return "python" in PurePath(proc.link(launcher.pid, "exe")).name


def _is_of_one_node(environ: Mapping[str, str]) -> bool:
    return any(environ.get(local, "") == environ.get(size, "-") for local, size in _LOCAL_SIZES)


def _is_loopback(address: str) -> bool:
    return address.lower() in ("localhost", "::1", "0.0.0.0") or address.startswith("127.")  # noqa: S104


def _tag(*parts: object) -> str:
    return hashlib.sha256(os.fsencode(repr(parts))).hexdigest()[: labels.TAG]
