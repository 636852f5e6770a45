"""Refuse a configuration file that other users can change.

Root's daemon does what the file says, and loads the code that it names.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from hookd.errors import ConfigError
from hookd.tool.config.projected import is_projected

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

_ACL = "system.posix_acl_access"


def open_checked(path: Path) -> BinaryIO:
    """Open a configuration file, or raise if other users can change it.

    No file may be world-writable. For root the file must belong to root, and only root may be able to replace it: every
    directory and link on the path to it is checked.

    Raises:
        ConfigError: reason "unsafe-config": another user owns or can write the file, or a part of the path to it.
        OSError: it does not exist, or cannot be read.
    """
    # O_PATH refers to the file without opening it: the file that is checked is the one that is read, even if it is replaced.
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        _require_opened(path, fd)
        return Path(f"/proc/self/fd/{fd}").open("rb")
    finally:
        os.close(fd)


def written_by_others(status: os.stat_result) -> int:
    """Return the bits of the mode that let other users write.

    The group's bit counts only for root: any other user chooses whom to share a group with.
    """
    bits = stat.S_IWOTH | (stat.S_IWGRP if os.geteuid() == 0 and status.st_gid != 0 else 0)
    return status.st_mode & bits


def written_through_acl(status: os.stat_result, where: int | str | Path) -> bool:
    """Whether an access control list may let other users write to root's file or directory.

    Args:
        status: of the file.
        where: its path, or a descriptor that is not O_PATH.
    """
    # If there is a list, the group's bits are its mask: no entry grants more. The entries themselves are not parsed.
    if os.geteuid() != 0 or not status.st_mode & stat.S_IWGRP:
        return False
    try:
        return bool(os.getxattr(where, _ACL))
    except OSError as exc:
        if exc.errno in (errno.ENODATA, errno.ENOTSUP):
            return False
        raise


def _require_opened(path: Path, fd: int) -> None:
    status = os.fstat(fd)
    if status.st_mode & stat.S_IWOTH:
        raise _writable(path)
    if os.geteuid() != 0:
        return
    _require(path, status, f"/proc/self/fd/{fd}")
    for part in _parts_to(path.absolute()):
        _require_part(part, is_needed=stat.S_ISREG(status.st_mode) and status.st_nlink > 0)
    # Nobody else can change a path that has passed. If it still leads to the opened file, nobody else has put it there.
    if not os.path.samestat(path.stat(), status):
        raise ConfigError(f"{path} was replaced while it was checked", reason="unsafe-config", hint="Try again.")


def _parts_to(path: Path) -> Iterator[Path]:
    """Yield a path and all directories and links that lead to it.

    For the target of a link, the parts of its own path are included.
    """
    for part in (*reversed(path.parents), path):
        yield part
        if part.is_symlink():
            yield from _parts_to(part.parent / part.readlink())


def _require_part(part: Path, *, is_needed: bool) -> None:
    try:
        status = part.lstat()
    except FileNotFoundError:  # the target of a link of /proc/PID/fd need not be a path
        if is_needed:
            raise
        return
    _require(part, status, part)


def _require(part: Path, status: os.stat_result, where: str | Path) -> None:
    if status.st_uid not in (0, os.geteuid()) and not _is_unmapped(status.st_uid):
        raise ConfigError(
            f"{part} belongs to user {status.st_uid}, who can change the configuration of root's daemon",
            reason="unsafe-config",
            hint=f"Check its content and `chown root {part}`, or keep the configuration below /etc/hookd.",
        )
    if stat.S_ISLNK(status.st_mode) or (stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX):
        return
    if written_by_others(status) and not (stat.S_ISDIR(status.st_mode) and is_projected(part)):
        raise _writable(part)
    if written_through_acl(status, where):
        raise _listed(part)


def _writable(part: Path) -> ConfigError:
    return ConfigError(
        f"other users can write to {part}, and so change the daemon's configuration",
        reason="unsafe-config",
        hint=f"`chmod go-w {part}`, and check its content.",
    )


def _listed(part: Path) -> ConfigError:
    return ConfigError(
        f"an access control list lets others write to {part}, and so change the daemon's configuration",
        reason="unsafe-config",
        hint=f"`setfacl -b {part}`, and check its content.",
    )


def _is_unmapped(uid: int) -> bool:
    """Whether a uid stands for all users outside of our user namespace.

    The machine's root is one of them.
    """
    if uid != int(Path("/proc/sys/kernel/overflowuid").read_text()):
        return False
    ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return not any(int(first) <= uid < int(first) + int(count) for first, _, count in ranges)
