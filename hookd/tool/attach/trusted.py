"""Which files of a plugin directory may be carried into a target: whoever can write them has code run there. Tool side.

A directory is trusted by its owner and its mode, as sshd trusts a home: root, hookd's own user, or the target's own user,
who gets no further by it than they are. A file is held before it is judged and only then opened, see `untrusted`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hookd.errors import PluginError
from hookd.tool.config.ownership import written_by_others, written_through_acl
from hookd.tool.linux import untrusted

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
            self._require(path, status)
            self._require_no_acl(path, status, path)
        except OSError as exc:
            raise PluginError(f"there is no plugin directory {path} ({exc.strerror})") from exc
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
            fd = untrusted.open_file(path, lambda status: self._require(path, status), follow=True)
            with os.fdopen(fd, "rb") as file:
                self._require_no_acl(path, os.fstat(fd), fd)  # a list cannot be read of what is only held
                data = file.read(MAX_BYTES + 1)
        except OSError as exc:
            raise PluginError(f"cannot read {path}: {exc.strerror}") from exc
        if len(data) > MAX_BYTES:
            raise PluginError(f"{path} is longer than {MAX_BYTES} bytes")
        return data

    def _require(self, path: Path, status: os.stat_result) -> bool:
        if self.owners is None:
            return True
        if status.st_uid not in self.owners:
            raise PluginError(
                f"{path} belongs to user {status.st_uid}: only root, hookd's user and the target's may bring code into it",
                reason="plugin-dir",
                hint="Copy it into a directory of yours.",
            )
        if written_by_others(status):
            raise PluginError(
                f"others may write to {path}",
                reason="plugin-dir",
                hint=f"`chmod go-w {path}`, and look at what is in it.",
            )
        return True

    def _require_no_acl(self, path: Path, status: os.stat_result, where: int | Path) -> None:
        if self.owners is not None and written_through_acl(status, where):
            raise PluginError(
                f"others may write to {path} through an access control list",
                reason="plugin-dir",
                hint=f"`setfacl -b {path}`, and look at what is in it.",
            )


ANYBODY = Trust(None)


def of_target(uid: int) -> Trust:
    """Give who may bring code into a target of this user."""
    return Trust(frozenset({0, os.geteuid(), uid}))
