"""Shared memory in which all ranks of a job agree on one change. Used on both sides.

The tool creates the memory file and passes it to every rank, with the step boundary at which the change is to take place.
Then the tool commits. A rank that reaches the boundary before the commit aborts. The first of the two decides for all
ranks, and permanently: the decision is a seal of the file, and the kernel sets it in one operation together with the seal
that forbids further seals. This needs no lock and no clock, and no process has to stay alive afterwards.

The file contains 8 bytes for each rank: the boundary from which the change no longer holds, or 0 while it holds. A rank
writes there when its plugin fails or when it detaches; the other ranks read it at each of their boundaries.

A *mark* identifies a boundary: it is the number of collectives that the job's default process group has begun. All ranks
begin the same collectives in the same order, so a mark means the same step in each rank, whatever number that step has.
"""

from __future__ import annotations

import errno
import posix
import struct

from hookd.wire.descriptors import Descriptor, fcntl
from hookd.wire.page.layout import F_ADD_SEALS, F_GET_SEALS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1, 2, 4
_NAME = "hookd-agreement"
_MAX_RANKS = 4096
_ENOUGH_MARKS = 2


class Agreement:
    """One agreement; owns its memory file."""

    def __init__(self, file: Descriptor) -> None:
        self._file = file

    @property
    def fd(self) -> int:
        """The descriptor of the memory file; -1 once it is closed.

        Raises:
            OSError: the program has closed it.
        """
        if self._file.number >= 0 and not self._file.is_ours():
            raise OSError(errno.EBADF, "the program has closed the file of the agreement")
        return self._file.number

    @classmethod
    def create(cls, ranks: int) -> Agreement:
        """Create an undecided agreement for this number of ranks."""
        fd = posix.memfd_create(_NAME, posix.MFD_CLOEXEC | posix.MFD_ALLOW_SEALING)
        posix.ftruncate(fd, 8 * ranks)
        return cls(Descriptor(fd))

    def decide(self, *, commit: bool) -> bool:
        """Commit or abort, unless it is decided already, and return whether it is committed.

        Raises:
            OSError: the file cannot be sealed.
        """
        try:
            fcntl(self.fd, F_ADD_SEALS, _SEAL_SEAL | (_SEAL_GROW if commit else _SEAL_SHRINK))
        except OSError as exc:
            if exc.errno != errno.EPERM:
                raise
        seals = fcntl(self.fd, F_GET_SEALS, 0)
        return bool(seals & _SEAL_SEAL and seals & _SEAL_GROW)

    def end(self, rank: int, mark: int) -> None:
        """Record that the change no longer holds from `mark` on, which must not be 0."""
        posix.pwrite(self.fd, struct.pack("=Q", mark), 8 * rank)

    def ended(self) -> tuple[int, int] | None:
        """Return the earliest mark from which the change no longer holds, and the rank that recorded it; None while it holds."""
        data = posix.pread(self.fd, 8 * _MAX_RANKS, 0)
        marks = struct.unpack(f"={len(data) // 8}Q", data[: len(data) // 8 * 8])
        ends = [(mark, rank) for rank, mark in enumerate(marks) if mark]
        return min(ends) if ends else None

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._file.close()


def disagreement(marks: Sequence[Sequence[int]]) -> str:
    """Return why the ranks' last boundaries do not identify the same steps, or "" if they do.

    Args:
        marks: for each rank, the marks of its last boundaries, ascending.
    """
    if any(len(set(own)) < _ENOUGH_MARKS for own in marks):
        return "a rank has not taken two steps with a collective between them"
    low, high = max(own[0] for own in marks), min(own[-1] for own in marks)
    common = [{mark for mark in own if low <= mark <= high} for own in marks]
    if any(own != common[0] for own in common):
        return "the ranks do not make the same collectives between their steps"
    if len(common[0]) < _ENOUGH_MARKS:
        return "the ranks are too far apart"
    return ""


def boundary_ahead(ranks: Iterable[tuple[Sequence[int], float]], margin_s: float) -> int:
    """Choose a mark that is ahead of all ranks by three steps, or by more if these take less than `margin_s`.

    Args:
        ranks: for each rank, the marks of its last boundaries, at least two of them different, and the seconds between
            the first and the last of them.
        margin_s: the least distance, in seconds.
    """
    ahead = 0
    for own, span_s in ranks:
        length = own[-1] - own[0]
        steps_s = length / max(span_s, 1e-6) * margin_s
        ahead = max(ahead, own[-1] + int(max(3 * length / (len(own) - 1), steps_s)) + 1)
    return ahead
