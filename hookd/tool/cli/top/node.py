"""The targets of this node: found by their pages as they come, kept when they end."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from hookd.errors import HookdError, NoSuchTarget
from hookd.tool.attach import discover
from hookd.tool.cli.top.target import Target
from hookd.tool.linux import proc
from hookd.tool.linux.owner import user_name
from hookd.wire import page

if TYPE_CHECKING:
    from hookd.tool.daemon.client import DaemonClient

SCAN_S = 2.0
"""How often it is looked for new targets."""
FULL_SCANS = 5
"""Every so many of these looks into every process, also where nothing seems to have been mapped since the last one."""
KEPT = 100
"""Targets that have ended and are still shown, the last ones: each holds its last copy of a page."""
ASK_S = 3.0
"""For so long the view waits for the daemon's answer."""
DAEMON_S = 10.0
"""How long a daemon that did not answer is left in peace."""


class Node:
    """Finds and reads targets. The targets themselves notice nothing: their pages are read with pread.

    Args:
        client: the daemon, if one runs: it knows the labels of runs, hangs, and how a process ended.
        user: the uid of the user whose targets are shown; None: all.

    Attributes:
        targets: also those that have ended since, in the order in which they were found.
        daemon: what the title says of the daemon.
    """

    def __init__(self, client: DaemonClient | None, user: int | None = None) -> None:
        self.targets: list[Target] = []
        self.daemon = "no daemon" if client is None else "daemon"
        self._client = client
        self._user = None if user is None else user_name(user)
        self._sizes: dict[int, bytes] = {}
        self._scanned: float | None = None
        self._scans = 0
        self._ask_again = 0.0

    def read(self, now: float) -> None:
        """Look for new targets if it is time, ask the daemon, read all pages. `now` in monotonic seconds."""
        if self._scanned is None or now - self._scanned >= SCAN_S:
            self._scanned = now
            self._scan()
        if self._client is not None and now >= self._ask_again:
            self._ask(self._client, now)
        for target in self.targets:
            target.read(now)
        for target in [one for one in self.targets if one.ended][:-KEPT]:
            self.targets.remove(target)

    def _scan(self) -> None:
        living = {target.pid for target in self.targets if not target.ended}
        sizes = {pid: proc.size(pid) for pid in map(int, filter(str.isdecimal, os.listdir("/proc")))}  # noqa: PTH208
        known = self._sizes if self._scans % FULL_SCANS else {}
        for pid, size in sizes.items():
            if size and pid not in living and size != known.get(pid):
                self._try(pid)
        self._sizes = sizes
        self._scans += 1

    def _try(self, pid: int) -> None:
        with contextlib.suppress(HookdError, OSError, ValueError):  # it has gone, or is not ours to see
            fd = discover.find_page(pid) if discover.is_in_scope(pid) else None
            if fd is not None:
                try:
                    target = Target(pid, proc.start_ticks(pid), page.PageReader(fd))
                except HookdError as error:
                    target = Target(pid, proc.start_ticks(pid), None)
                    target.error = error
                self._put(target)

    def _put(self, target: Target) -> None:
        """Add one of the user; it takes the place of what the same process was before it was attached again."""
        if self._user not in (None, target.user):
            target.close()
            return
        for at, old in enumerate(self.targets):
            if (old.pid, old.start) == (target.pid, target.start):
                old.close()
                self.targets[at] = target
                return
        self.targets.append(target)

    def _ask(self, client: DaemonClient, now: float) -> None:
        try:
            rows = client.targets(ASK_S)
        except HookdError:
            self.daemon, self._ask_again = "daemon does not answer", now + DAEMON_S
            return
        self.daemon = "daemon"
        known = {(target.pid, target.start): target for target in self.targets}
        for row in rows:
            if self._user not in (None, row.get("user")):
                continue
            target = known.get((row["pid"], row["start_ticks"])) or self._add_told(row)
            target.told = row

    def _add_told(self, row: dict[str, Any]) -> Target:
        """Take one that only the daemon can read: another user's, or one that has ended."""
        target = Target(row["pid"], row["start_ticks"], None)
        self.targets.append(target)
        return target

    def of(self, word: str) -> tuple[int | None, str | None]:
        """Find what a word means: a pid of a target, else the label of a run; one of the two is None.

        Raises:
            NoSuchTarget: it is neither.
        """
        if word.isdecimal() and any(target.pid == int(word) for target in self.targets):
            return int(word), None
        if any(target.run == word for target in self.targets):
            return None, word
        if word.isdecimal():
            discover.open_page(int(word)).close()  # says why it is none
        raise NoSuchTarget(
            f"there is no target or run '{word}'",
            reason="no-such-run",
            hint="`hookd status` lists those that are watched.",
        )

    def close(self) -> None:
        """Let go of all pages."""
        for target in self.targets:
            target.close()
