"""One fingerprint that the daemon keeps: its file, and the digests of its steps."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from hookd.tool.fingerprints import file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hookd.tool.fingerprints.steps import Step
    from hookd.wire.fingerprint import KeptRow

SHARED = frozenset(("gradients", "update"))
"""The phases that replicas of a data-parallel training have in common: their batches differ."""
MOST = 4096
"""Number of steps whose digests are kept in memory, the last ones; the file has more."""
_DIGEST = 8
_NAME = re.compile(r"[^A-Za-z0-9._@-]+")
_LONGEST_NAME = 80


class Digests(NamedTuple):
    """The digests of one step.

    Attributes:
        whole: of everything, see `steps.Step.digest`.
        shared: of the SHARED phases; "" if there are none.
        mark: see `steps.Step`.
    """

    whole: str
    shared: str = ""
    mark: int = 0

    @classmethod
    def of(cls, step: Step, whole: str) -> Digests:
        """Compute what replicas have in common of a step with this digest."""
        found, count = blake2b(digest_size=_DIGEST), 0
        for key, entry in step.entries.items():
            if key.phase in SHARED:
                found.update(json.dumps([*key.row(), *entry]).encode())
                count += 1
        return cls(whole, found.hexdigest() if count else "", step.mark)


@dataclass
class Kept:
    """A fingerprint. One thread adds steps, others read.

    Attributes:
        path: of its file.
        run, rank, pid: of the target.
        began: Unix time at which the recording began.
        updated: Unix time of the last step.
        is_live: whether it is still being recorded.
        steps: number of steps recorded.
        lost: steps that came too fast.
    """

    path: Path
    run: str
    rank: str
    pid: int
    began: float
    updated: float = 0.0
    is_live: bool = True
    steps: int = 0
    lost: int = 0
    _digests: dict[int, Digests] = field(default_factory=dict)

    @classmethod
    def of_file(cls, path: Path) -> Kept:
        """Return the fingerprint that an earlier daemon has recorded.

        Raises:
            HookdError: it cannot be read.
        """
        about, digests = file.digests(path)
        status = path.stat()
        kept = cls(path, about.get("run", ""), str(about.get("rank", 0)), about.get("pid", 0), about.get("began", 0.0), status.st_mtime)  # fmt: skip
        kept.is_live, kept.steps = False, len(digests)
        last = list(digests)[-MOST:]
        kept._digests = {step: Digests(digests[step]) for step in last}
        return kept

    def add(self, step: Step, digest: str, now: float) -> None:
        """Note a step that was recorded, and its digest."""
        self._digests[step.number] = Digests.of(step, digest)
        self.steps, self.updated = self.steps + 1, now
        if len(self._digests) > MOST:
            self._digests = dict(list(self._digests.items())[MOST // 4 :])

    def digests(self) -> dict[int, Digests]:
        """Return the digests of the last steps, by number, in order."""
        return dict(self._digests)

    def last(self) -> tuple[int, Digests] | None:
        """Return the number and the digests of the last step."""
        digests = self.digests()
        return next(reversed(digests.items()), None)

    def row(self) -> KeptRow:
        """Return its row in the daemon's list."""
        last = self.last()
        return {
            "path": str(self.path),
            "run": self.run,
            "rank": self.rank,
            "pid": self.pid,
            "began": self.began,
            "updated": self.updated or None,
            "is_live": self.is_live,
            "steps": self.steps,
            "lost": self.lost,
            "step": None if last is None else last[0],
            "digest": "" if last is None else last[1].whole,
        }


def file_name(run: str, rank: str, pid: int, began: float) -> str:
    """Return the name of a file, which no other recording has; the run's name is the target's choice."""
    plain = _NAME.sub("_", run)[:_LONGEST_NAME].lstrip(".") or "run"
    return f"{plain}-rank{_NAME.sub('_', rank)[:10]}-{pid}-{int(began * 1000):x}.jsonl"


class Agreement(NamedTuple):
    """How two fingerprints agree.

    Attributes:
        common: number of steps that both have.
        equal: the last step before they part; None if none was equal.
        parted: the first step after it that differs; None if none does.
    """

    common: int
    equal: int | None
    parted: int | None


def agreement(ours: Kept, other: Kept) -> Agreement:
    """Compare two fingerprints by the digests of their steps; of two ranks of one run, by what replicas have in common.

    Args:
        ours: to compare.
        other: to compare with.

    Returns:
        The agreement, with the numbers of steps as `ours` counts them.
    """
    common, equal, parted = 0, None, None
    for step, mine, theirs in _replicas(ours, other) if is_replica(ours, other) else _runs(ours, other):
        common += 1
        if mine == theirs:
            equal, parted = step, None
        elif parted is None:
            parted = step
    return Agreement(common, equal, parted)


def is_replica(ours: Kept, other: Kept) -> bool:
    """Whether two fingerprints are of two ranks of one run."""
    return ours.run == other.run and ours.rank != other.rank


def _runs(ours: Kept, other: Kept) -> Iterator[tuple[int, str, str]]:
    theirs = other.digests()
    for step, mine in ours.digests().items():
        if step in theirs:
            yield step, mine.whole, theirs[step].whole


def _replicas(ours: Kept, other: Kept) -> Iterator[tuple[int, str, str]]:
    """Yield the same steps of two ranks, which may count them differently."""
    theirs = {one.mark or -step: one for step, one in other.digests().items()}
    for step, mine in ours.digests().items():
        found = theirs.get(mine.mark or -step)
        if found is not None and mine.shared and found.shared:
            yield step, mine.shared, found.shared
