"""Map a uid to its accountable user, to whom per-user quotas are charged."""

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


class TimeLimit:
    """Limit the time that is spent on the processes of each user.

    Args:
        limit_s: seconds for each user. Work that began within the limit is completed.
        clock: monotonic seconds.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float]) -> None:
        self._limit_s, self._clock = limit_s, clock
        self._spent: defaultdict[int, float] = defaultdict(float)

    def is_over(self, user: int) -> bool:
        """Whether a user's time is used up."""
        return self._spent[user] > self._limit_s

    @contextlib.contextmanager
    def of(self, user: int) -> Iterator[None]:
        """Charge the time spent in this context to a user."""
        begun = self._clock()
        try:
            yield
        finally:
            self._spent[user] += self._clock() - begun


def uid_of(pid: int) -> int:
    """Return the owner of a process as the kernel reports it, -1 if the process is gone or hidden."""
    try:
        lines = Path(f"/proc/{pid}/status").read_bytes().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(b"Uid:"))
    except (OSError, StopIteration):
        return -1


def account_of(pid: int) -> int:
    """Return the accountable user of a process, -1 if the process is gone or hidden."""
    return account(uid_of(pid))


def account(uid: int) -> int:
    """Return the accountable user of a uid.

    For a uid in a range that `/etc/subuid` assigns to a user, this is that user; otherwise it is the uid itself. A user has
    65,536 such uids for rootless containers, and must not get that many quotas. Ranges assigned to root or to a system account
    (`kubelet`) serve the containers of others, 65,536 uids each: the first uid of such a block is accountable for the whole
    block. A uid that has a name is accountable for itself: the uids of a directory service may lie in such a range by mistake.
    Source: subuid(5).
    """
    try:
        modified_ns = _LENT.stat().st_mtime_ns
    except OSError:
        return uid
    for owner, first, end in _ranges(modified_ns):
        if first <= uid < end:
            accountable = owner if owner >= _FIRST_USER else uid - (uid - first) % _A_CONTAINERS
            return uid if accountable == uid or _has_name(uid, modified_ns) else accountable
    return uid


@functools.lru_cache(maxsize=4096)
def _has_name(uid: int, _modified_ns: int) -> bool:  # cached until /etc/subuid changes
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


@functools.lru_cache(maxsize=1)
def _ranges(_modified_ns: int) -> tuple[tuple[int, int, int], ...]:
    """Return owner, first uid and end (exclusive) of each well-formed line."""
    ranges = []
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
        ranges.append((owner, int(words[1]), int(words[1]) + int(words[2])))
    return tuple(ranges)
