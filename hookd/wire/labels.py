"""Labels `run` and `rank` of a process. Stdlib only; used on both sides.

The agent and the daemon use the same functions, so they label a process alike.
"""

from __future__ import annotations

import uuid

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_LAUNCHERS = (
    # (rank, world size, local rank) of torchrun, Slurm, Open MPI and MPICH; the first launcher whose rank is set counts.
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)
_SLURM_PSEUDO_STEPS = 0xFFFFFFF0
"""Step ids from here up stand for names: batch, extern, interactive (slurm.h, SLURM_BATCH_SCRIPT)."""
_PRINTABLE = (
    (" ", "~"), ("\u00a0", "\u061b"), ("\u061d", "\u200d"), ("\u2010", "\u2027"), ("\u202f", "\u2065"), ("\u206a", "\ud7ff"),
    ("\ue000", "\U0010ffff"),
)  # fmt: skip
"""Excludes line separators and bidirectional controls, which would display a text in another order.
Ranges, because compiling a regular expression would take 6 ms in the target."""
MAX_RUN = 128
"""Maximum length of a run's name, in characters."""
TAG = 8
"""Length of the tag of a run that nobody has named, in hexadecimal digits."""


def given_run(environ: Mapping[str, str]) -> str:
    """Return the name that a person or a scheduler has given the run, "" if nobody has.

    It is HOOKD_RUN, the Slurm job and step, or torchrun's `--rdzv-id`. The latter counts only if a person chose it: its default
    is `none`, and `--standalone` generates a uuid.
    """
    elastic = environ.get("TORCHELASTIC_RUN_ID", "")
    is_default = elastic.strip().lower() == "none" or is_uuid(elastic)
    return clean_run(environ.get("HOOKD_RUN", "")) or _slurm(environ) or ("" if is_default else clean_run(elastic))


def tagged(script: str, tag: str) -> str:
    """Return the name of a run that nobody has named: that of its script, and a tag that no other job has."""
    return f"{script[: MAX_RUN - TAG - 1]}@{tag}"


def is_called(run: str, word: str) -> bool:
    """Whether a word means this run: its name, or its name without the tag."""
    return run == word or (run.startswith(f"{word}@") and _is_tag(run[len(word) + 1 :].partition("~")[0]))


def called(runs: Iterable[str], word: str) -> list[str]:
    """Return the runs that a word can mean: the one of exactly this name, else all whose name it is without the tag."""
    names = list(dict.fromkeys(run for run in runs if is_called(run, word)))
    return [word] if word in names else names


def _is_tag(text: str) -> bool:
    return len(text) == TAG and all(char in "0123456789abcdef" for char in text)


def script_name(script: str) -> str:
    """Return the last part of a script's path.

    For `__main__.py` that is the name of its package; without a script it is `python`.
    """
    *folders, name = filter(None, script.split("/")) if script.strip("/") else [""]
    if name == "__main__.py":
        name = folders[-1] if folders else ""
    return (clean_run(name) if name not in ("-c", "-m", "-") else "") or "python"


def rank_label(environ: Mapping[str, str]) -> str:
    """Return the rank in the whole job, "0" if no launcher has set one."""
    return str(_number(environ, 0, default=0))


def local_rank(environ: Mapping[str, str]) -> int:
    """Return the rank on this node, 0 if no launcher has set one."""
    return _number(environ, 2, default=0)


def world_size(environ: Mapping[str, str]) -> int:
    """Return the number of ranks, 1 if no launcher has set it."""
    return max(1, _number(environ, 1, default=1))


class Claim:
    """A target's title to the labels `run` and `rank`.

    Attributes:
        pid: of the target.
        launcher: pid of the process that has started its job; its own if it is a single process.
        rank: see `rank_label`.
        wanted: the run that it would be without others.
        run: the run under which it is served; it differs from `wanted` after a clash.
        uid: owner of the process.
    """

    __slots__ = ("launcher", "pid", "rank", "run", "uid", "wanted")

    def __init__(self, pid: int, launcher: int, rank: str, wanted: str, run: str, *, uid: int = -1) -> None:
        self.pid = pid
        self.launcher = launcher
        self.rank = rank
        self.wanted = wanted
        self.run = run
        self.uid = uid


def claim(  # noqa: PLR0913  a claim has no fewer parts
    pid: int, job: int, rank: str, wanted: str, *, chosen: bool, others: Iterable[Claim], uid: int = -1
) -> Claim:
    """Return the claim of a new target, so that no two targets share run and rank, and no two users share a run.

    Targets that are served already keep their names. Callers add targets in the order of their start, so the younger job
    gets the suffix `~<pid of its launcher>`, the same for all of its ranks.

    Args:
        pid: of the new target.
        job: its launcher.
        rank: its rank.
        wanted: its run, if no other target has that name.
        chosen: whether ranks of several launchers can be one run of that name, because a person chose it or they meet at one
            place. Jobs of other launchers otherwise get another name.
        others: the claims of the targets that are served already.
        uid: owner of the process.
    """
    others = list(others)
    siblings = [other.run for other in others if (other.uid, other.launcher, other.wanted) == (uid, job, wanted)]
    # A person may have chosen the names before these.
    more = (f"{wanted}~{pid}.{number}" for number in range(2, 3 + len(others)))

    def is_free(name: str) -> bool:
        sharing = [other for other in others if other.run == name]
        strangers = any(other.uid != uid or (not chosen and other.launcher != job) for other in sharing)
        return not strangers and all(other.rank != rank for other in sharing)

    names = (*siblings, wanted, f"{wanted}~{job}", f"{wanted}~{pid}", *more)
    return Claim(pid, job, rank, wanted, next(filter(is_free, names)), uid=uid)


def clean(text: str) -> str:
    """Return a name as one short line, with `_` for each character that a terminal or a log would interpret."""
    shown = (char if any(low <= char <= high for low, high in _PRINTABLE) else "_" for char in text.strip()[:MAX_RUN])
    return "".join(shown)


def clean_run(text: str) -> str:
    """Return the name of a run, also without apostrophes: between two of them a shell reads it as it is."""
    return clean(text).replace("'", "_")


def _slurm(environ: Mapping[str, str]) -> str:
    job, step = clean_run(environ.get("SLURM_JOB_ID", "")), environ.get("SLURM_STEP_ID", "")
    if job and _is_number(step) and int(step) < _SLURM_PSEUDO_STEPS:
        return f"{job}.{int(step)}"
    return job


def is_uuid(text: str) -> bool:
    """Whether a text is a uuid, as torchrun generates it for a job without a name."""
    try:
        uuid.UUID(text.strip())
    except ValueError:
        return False
    return True


def _variables(environ: Mapping[str, str]) -> tuple[str, str, str] | None:
    return next((names for names in _LAUNCHERS if _is_number(environ.get(names[0], "").strip())), None)


def _number(environ: Mapping[str, str], which: int, default: int) -> int:
    names = _variables(environ)
    text = environ.get(names[which], "").strip() if names is not None else ""
    return int(text) if _is_number(text) and len(text) < 10 else default


def _is_number(text: str) -> bool:
    # `int` accepts the digits of all scripts, and refuses numbers of thousands of digits.
    return text.isascii() and text.isdecimal() and len(text) < 20
