"""Which user answers for a uid: what each user has a share of is counted by this. Tool side."""

from __future__ import annotations

import contextlib
import functools
import pwd
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_LENT = Path("/etc/subuid")
_FIRST_USER = 1000  # UID_MIN of login.defs(5)
_A_CONTAINERS = 1 << 16


class Budget:
    """Time that is spent on each user's processes, of which no user has more than so much.

    Args:
        limit_s: what has begun before it is over goes on to its end.
        clock: monotonic seconds.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float]) -> None:
        self._limit_s, self._clock = limit_s, clock
        self._spent: defaultdict[int, float] = defaultdict(float)

    def is_over(self, user: int) -> bool:
        """Tell whether a user's time is over."""
        return self._spent[user] > self._limit_s

    @contextlib.contextmanager
    def of(self, user: int) -> Iterator[None]:
        """Count what is done here as a user's."""
        begun = self._clock()
        try:
            yield
        finally:
            self._spent[user] += self._clock() - begun


def uid_of(pid: int) -> int:
    """Return the owner of a process as the kernel says, -1 where it is gone or hidden."""
    try:
        lines = Path(f"/proc/{pid}/status").read_bytes().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(b"Uid:"))
    except (OSError, StopIteration):
        return -1


def account_of(pid: int) -> int:
    """Return the user who answers for a process, -1 where it is gone or hidden."""
    return account(uid_of(pid))


def account(uid: int) -> int:
    """Return the user who answers for a uid: for one of the range that `/etc/subuid` lends to a user, that user.

    A user has 65,536 such uids for rootless containers, and must not have that many shares. What is lent to root or an account of
    the system (`kubelet`) is for others' containers, 65,536 for each: there the first of those answers for all of them. A uid
    that has a name of its own answers for itself, as of a directory service whose uids lie in such a range by mistake. Source:
    subuid(5).
    """
    try:
        written = _LENT.stat().st_mtime_ns
    except OSError:
        return uid
    for owner, first, end in _ranges(written):
        if first <= uid < end:
            answers = owner if owner >= _FIRST_USER else uid - (uid - first) % _A_CONTAINERS
            return uid if answers == uid or _has_name(uid, written) else answers
    return uid


@functools.lru_cache(maxsize=4096)
def _has_name(uid: int, _written: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


@functools.lru_cache(maxsize=1)
def _ranges(_written: int) -> tuple[tuple[int, int, int], ...]:
    """Return owner, first uid and the one after the last, of each line that makes sense."""
    found = []
    try:
        lines = _LENT.read_text("utf-8", "replace").splitlines()
    except OSError:
        return ()
    for line in lines:
        words = line.split(":")
        if len(words) != 3 or not (words[1].isdecimal() and words[2].isdecimal()):
            continue
        try:
            owner = int(words[0]) if words[0].isdecimal() else pwd.getpwnam(words[0]).pw_uid
        except KeyError:
            continue
        found.append((owner, int(words[1]), int(words[1]) + int(words[2])))
    return tuple(found)
