"""Decide which files of a plugin directory may be sent to a target.

Anyone who can write such a file can run code in the target. A directory is trusted by its owner and its mode, as sshd trusts a
home directory. Trusted owners are root, hookd's own user, and the target's own user, who gains no rights by it. A file is checked
through an O_PATH descriptor and only then opened, see `untrusted`.
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
"""Maximum size of one source."""


@dataclass(frozen=True)
class Trust:
    """The users whose files may be read; other users must not have write access.

    Attributes:
        owners: the uids of these users; None for any file, because it is not sent to a target.
    """

    owners: frozenset[int] | None

    def directory(self, path: Path) -> Trust:
        """Check a directory; return the trust for its files.

        Raises:
            PluginError: reason "plugin-dir": another user owns it or may write to it.
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
        """Return the content of a source file.

        Raises:
            PluginError: it is not a file or is too long; with reason "plugin-dir": another user owns it or may write to it.
        """
        try:
            fd = untrusted.open_file(path, lambda status: self._require(path, status), follow=True)
            with os.fdopen(fd, "rb") as file:
                self._require_no_acl(path, os.fstat(fd), fd)  # an ACL cannot be read through an O_PATH descriptor
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
    """Return the trust for files that are sent to a target of a user."""
    return Trust(frozenset({0, os.geteuid(), uid}))
