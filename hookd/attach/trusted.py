"""Which files of a plugin directory may be carried into a target: whoever can write them has code run there. Tool side.

A directory is trusted by its owner and its mode, as sshd trusts a home: root, hookd's own user, or the target's own user,
who gets no further by it than they are. Every file is opened before it is judged, so that a link or a pipe that is put
there meanwhile changes nothing.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hookd.errors import PluginError

if TYPE_CHECKING:
    from pathlib import Path

MAX_BYTES = 4 << 20
"""Of one source."""


@dataclass(frozen=True)
class Trust:
    """Who may own what is read, and the mode that it must not have.

    Attributes:
        owners: their user ids; None: anybody's may be read, because it is carried nowhere.
    """

    owners: frozenset[int] | None

    def directory(self, path: Path) -> Trust:
        """Check a directory; give whom its files may belong to.

        Raises:
            PluginError: reason "plugin-dir": another user may write there.
        """
        try:
            status = path.stat()
        except OSError as exc:
            raise PluginError(f"there is no plugin directory {path} ({exc.strerror})") from exc
        self._require(path, status)
        if self.owners is None:
            return self
        ours = frozenset({0, os.geteuid()})
        return Trust(ours if status.st_uid in ours else frozenset({status.st_uid}))

    def read(self, path: Path) -> bytes:
        """Read a source.

        Raises:
            PluginError: it is no file, is too long, or another user may write it; reason "plugin-dir" then.
        """
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would wait for a writer
        except OSError as exc:
            raise PluginError(f"cannot read {path}: {exc.strerror}") from exc
        with open(fd, "rb") as file:  # noqa: PTH123  a descriptor
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise PluginError(f"{path} is no file")
            self._require(path, status)
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise PluginError(f"{path} is longer than {MAX_BYTES} bytes")
        return data

    def _require(self, path: Path, status: os.stat_result) -> None:
        if self.owners is None:
            return
        if status.st_uid not in self.owners:
            raise PluginError(
                f"{path} belongs to user {status.st_uid}: only root, hookd's user and the target's may bring code into it",
                reason="plugin-dir",
                hint="Copy it into a directory of yours.",
            )
        if status.st_mode & _written_by_others(status):
            raise PluginError(
                f"others may write to {path}",
                reason="plugin-dir",
                hint=f"`chmod go-w {path}`, and look at what is in it.",
            )


ANYBODY = Trust(None)


def of_target(uid: int) -> Trust:
    """Give who may bring code into a target of this user."""
    return Trust(frozenset({0, os.geteuid(), uid}))


def _written_by_others(status: os.stat_result) -> int:
    """Give the bits that must not be set. To a tool that is not root its user's groups are their own matter."""
    return stat.S_IWOTH | (stat.S_IWGRP if os.geteuid() == 0 and status.st_gid != 0 else 0)
