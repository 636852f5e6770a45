"""Which run a process belongs to and which rank it is. Stdlib only; used on both sides.

The agent and the daemon ask the same functions, so that both say the same of one process.
"""

from __future__ import annotations

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
_PRINTABLE = (
    (" ", "~"), ("\u00a0", "\u061b"), ("\u061d", "\u200d"), ("\u2010", "\u2027"), ("\u202f", "\u2065"), ("\u206a", "\ud7ff"),
    ("\ue000", "\U0010ffff"),
)  # fmt: skip
"""Without line separators and without marks that turn the direction of writing, which would show a text in another order.
Ranges, not a regular expression: to compile that takes a target 6 ms."""
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
    *folders, name = filter(None, script.split("/")) if script.strip("/") else [""]
    if name == "__main__.py":
        name = folders[-1] if folders else ""
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
        uid: owner of the process.
    """

    __slots__ = ("launcher", "meeting", "pid", "rank", "run", "uid", "wanted")

    def __init__(self, pid: int, launcher: int, rank: str, wanted: str, run: str, *, uid: int = -1) -> None:
        self.pid = pid
        self.launcher = launcher
        self.rank = rank
        self.wanted = wanted
        self.run = run
        self.uid = uid
        self.meeting = ""


def claim(  # noqa: PLR0913  a claim has no fewer parts
    pid: int, job: int, rank: str, wanted: str, *, chosen: bool, others: Iterable[Claim], uid: int = -1
) -> Claim:
    """Settle the run of one more target so that no two targets share run and rank, and no two users a run.

    Those that are served already keep their names: callers bring targets in the order of their start, so it is the
    younger job that gets `~<pid of its launcher>`, all of its ranks alike.

    Args:
        pid: of the new target.
        job: its launcher.
        rank: its rank.
        wanted: its run, as its page or its environment has it.
        chosen: whether somebody chose that name; ranks of several launchers then form one run, as in a job that
            spans nodes, while two jobs that merely run the same script never do.
        others: the claims of those that are served.
        uid: owner of the process.
    """
    others = list(others)
    siblings = [one.run for one in others if (one.uid, one.launcher, one.wanted) == (uid, job, wanted)]
    more = (f"{wanted}~{pid}.{number}" for number in range(2, 3 + len(others)))  # those before may be taken on purpose

    def is_free(name: str) -> bool:
        sharing = [other for other in others if other.run == name]
        strangers = any(other.uid != uid or (not chosen and other.launcher != job) for other in sharing)
        return not strangers and all(other.rank != rank for other in sharing)

    names = (*siblings, wanted, f"{wanted}~{job}", f"{wanted}~{pid}", *more)
    return Claim(pid, job, rank, wanted, next(filter(is_free, names)), uid=uid)


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
