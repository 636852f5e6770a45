"""Which run a process belongs to and which rank it is. Stdlib only; used on both sides.

The agent and the daemon ask the same functions, so that both say the same of one process.
"""

from __future__ import annotations

import os
import uuid

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_LAUNCHERS = (
    # (rank, world size, local rank), the first whose rank is set decides: torchrun, Slurm, Open MPI, MPICH.
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)
_SLURM_PSEUDO_STEPS = 0xFFFFFFF0
"""Steps from here on are no numbers but words: batch, extern, interactive (slurm.h, SLURM_BATCH_SCRIPT)."""
_PRINTABLE = ((" ", "~"), ("\u00a0", "\ud7ff"), ("\ue000", "\U0010ffff"))
"""Ranges, not a regular expression: to compile that takes a target 6 ms."""
MAX_RUN = 128
"""Characters of a run's name."""


def run_label(environ: Mapping[str, str], script: str) -> str:
    """Name the run: HOOKD_RUN, the Slurm job and step, torchrun's `--rdzv-id`, or else the script.

    torchrun's id counts only when a person chose it: its default is `none`, and `--standalone` invents a uuid.

    Args:
        environ: the target's environment.
        script: `sys.argv[0]` of the target, or what `script_name` makes of its command line.
    """
    return clean(environ.get("HOOKD_RUN", "")) or _slurm(environ) or _elastic(environ) or script_name(script)


def script_name(script: str) -> str:
    """Give the last part of a script's path; a package's `__main__.py` is named by the package, none is `python`."""
    head, name = os.path.split(script.rstrip("/"))
    if name == "__main__.py":
        name = os.path.split(head)[1]
    return (clean(name) if name not in ("-c", "-m", "-") else "") or "python"


def rank_label(environ: Mapping[str, str]) -> str:
    """Give the rank in the whole job, "0" where no launcher says anything."""
    return str(_number(environ, 0, default=0))


def local_rank(environ: Mapping[str, str]) -> int:
    """Give the rank on this node, 0 where no launcher says anything."""
    return _number(environ, 2, default=0)


def world_size(environ: Mapping[str, str]) -> int:
    """Give the number of ranks, 1 where no launcher says anything."""
    return max(1, _number(environ, 1, default=1))


def launcher(world_size: int, pid: int, ppid: int) -> int:
    """Give the pid that all ranks of one job on this node share: their parent's, or of a lone process its own."""
    return ppid if world_size > 1 else pid


class Claim:
    """A target and the run it is served under.

    Attributes:
        pid: of the target.
        launcher: see `launcher`.
        meeting: where the ranks of its job meet, "" if that is not known.
        rank: see `rank_label`.
        wanted: the run as the target's page names it.
        run: the run it is served under, which differs from `wanted` after a clash.
    """

    __slots__ = ("launcher", "meeting", "pid", "rank", "run", "wanted")

    def __init__(self, pid: int, launcher: int, rank: str, wanted: str, run: str) -> None:
        self.pid = pid
        self.launcher = launcher
        self.rank = rank
        self.wanted = wanted
        self.run = run
        self.meeting = ""


def claim(pid: int, job: int, rank: str, wanted: str, *, chosen: bool, others: Iterable[Claim]) -> Claim:
    """Settle the run of one more target so that no two targets share run and rank.

    Those that are served already keep their names: callers bring targets in the order of their start, so it is the
    younger job that gets `~<pid of its launcher>`, all of its ranks alike.

    Args:
        pid: of the new target.
        job: its launcher.
        rank: its rank.
        wanted: its run, as its page or its environment has it.
        chosen: whether somebody chose that name; ranks of several launchers then form one run, as in a job that
            spans nodes, while two jobs that merely run the same script never do.
        others: the living targets' claims.
    """
    others = list(others)
    siblings = [other.run for other in others if other.launcher == job and other.wanted == wanted]
    names = [*siblings, wanted, f"{wanted}~{job}", f"{wanted}~{pid}"]
    for name in names:
        sharing = [other for other in others if other.run == name]
        strangers = not chosen and any(other.launcher != job for other in sharing)
        if not strangers and all(other.rank != rank for other in sharing):
            return Claim(pid, job, rank, wanted, name)
    return Claim(pid, job, rank, wanted, names[-1])


def clean(text: str) -> str:
    """Make one short line of a name, with `_` for what a terminal or a log would obey."""
    kept = (one if any(low <= one <= high for low, high in _PRINTABLE) else "_" for one in text.strip()[:MAX_RUN])
    return "".join(kept)


def _slurm(environ: Mapping[str, str]) -> str:
    job, step = clean(environ.get("SLURM_JOB_ID", "")), environ.get("SLURM_STEP_ID", "")
    if job and step.isdecimal() and int(step) < _SLURM_PSEUDO_STEPS:
        return f"{job}.{int(step)}"
    return job


def _elastic(environ: Mapping[str, str]) -> str:
    run = clean(environ.get("TORCHELASTIC_RUN_ID", ""))
    try:
        uuid.UUID(run)
    except ValueError:
        return "" if run.lower() == "none" else run
    return ""


def _variables(environ: Mapping[str, str]) -> tuple[str, str, str] | None:
    return next((names for names in _LAUNCHERS if environ.get(names[0], "").strip().isdecimal()), None)


def _number(environ: Mapping[str, str], which: int, default: int) -> int:
    names = _variables(environ)
    text = environ.get(names[which], "").strip() if names is not None else ""
    return int(text) if text.isdecimal() and len(text) < 10 else default
