"""Find the targets of this node by their pages, and keep them when they end."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from hookd.errors import HookdError, NoSuchTarget
from hookd.tool.attach import discover
from hookd.tool.cli import options, targets
from hookd.tool.cli.top.target import Target
from hookd.tool.linux import proc
from hookd.tool.linux.owner import user_name
from hookd.wire import page

if TYPE_CHECKING:
    from hookd.tool.daemon.client import DaemonClient
    from hookd.wire.target import TargetRow

SCAN_S = 2.0
"""Interval of the scans for new targets."""
FULL_SCANS = 5
"""One in this many scans inspects every process, even if its address space has the same size as in the last scan."""
KEPT = 100
"""Ended targets that are still shown: the last ones, since each holds the last copy of its page."""
ASK_S = 3.0
"""Timeout of a request to the daemon."""
DAEMON_S = 10.0
"""Delay before the next request to a daemon that did not answer."""


class Node:
    """Finds and reads targets. Pages are read with pread, which the targets do not notice.

    Args:
        client: the daemon, if one runs: it knows the labels of runs, hangs, and how a process ended.
        user: the uid of the user whose targets are shown; None for all.

    Attributes:
        targets: all targets, including those that have ended, in the order in which they were found.
        daemon: the state of the daemon, for the title.
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
        """Scan for new targets if a scan is due, query the daemon, and read all pages.

        Args:
            now: monotonic seconds.
        """
        if self._scanned is None or now - self._scanned >= SCAN_S:
            self._scanned = now
            self._scan()
        if self._client is not None and now >= self._ask_again:
            self._ask(self._client, now)
        for target in self.targets:
            target.read(now)
        for target in [target for target in self.targets if target.ended][:-KEPT]:
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
        with contextlib.suppress(HookdError, OSError, ValueError):  # it is gone, or we may not read it
            fd = discover.find_page(pid) if discover.is_in_scope(pid) else None
            if fd is not None:
                try:
                    target = Target(pid, proc.start_ticks(pid), page.PageReader(fd))
                except HookdError as error:
                    target = Target(pid, proc.start_ticks(pid), None)
                    target.error = error
                self._put(target)

    def _put(self, target: Target) -> None:
        """Add a target of the selected user; replace that of an earlier attach to the same process."""
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
            target = known.get((row["pid"], row["start_ticks"])) or self._add_unreadable(row)
            target.row = row

    def _add_unreadable(self, row: TargetRow) -> Target:
        """Add and return a target that only the daemon can read, because it is another user's or has ended."""
        target = Target(row["pid"], row["start_ticks"], None)
        self.targets.append(target)
        return target

    def of(self, word: str) -> tuple[int | None, str | None]:
        """Return the pid of the target, or the label of the run, that a word names; the other one is None.

        Raises:
            NoSuchTarget: it names neither.
        """
        pid = options.number(word)
        if any(target.pid == pid for target in self.targets):
            return pid, None
        run = targets.only_run(word, [target.run for target in self.targets], "hookd top")
        if any(target.run == run for target in self.targets):
            return None, run
        if pid is not None:
            discover.open_page(pid).close()  # raises with the reason
        raise NoSuchTarget(
            f"there is no target or run '{word}'",
            reason="no-such-run",
            hint="`hookd status` lists the targets and runs that are watched.",
        )

    def close(self) -> None:
        """Close all pages."""
        for target in self.targets:
            target.close()
