"""Who can change a configuration file: root's daemon does what it says, and loads the code that it names. Tool side."""

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
    """Open a configuration file that nobody else can change; raise where other users can.

    No file may be writable for all. Root's must belong to root and lie where root alone can put another in its place:
    every directory and link on the way to it is checked.

    Raises:
        ConfigError: reason "unsafe-config": another user owns or can write the file, or something on the way to it.
        OSError: it does not exist, or cannot be read.
    """
    # Held by O_PATH, which opens nothing: what is checked is then read, whatever the name leads to by then.
    held = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        _require_held(path, held)
        return Path(f"/proc/self/fd/{held}").open("rb")
    finally:
        os.close(held)


def written_by_others(status: os.stat_result) -> int:
    """Return the mode's bits by which others write. To a tool that is not root, its user's groups are their own matter."""
    bits = stat.S_IWOTH | (stat.S_IWGRP if os.geteuid() == 0 and status.st_gid != 0 else 0)
    return status.st_mode & bits


def written_through_acl(status: os.stat_result, where: int | str | Path) -> bool:
    """Whether root's file or directory has an access control list by which others may write.

    Args:
        status: of the file.
        where: its path, or a descriptor that is not O_PATH.
    """
    # With a list, the group's bits are its mask: no entry grants more. Which entries use it is not worth a parser.
    if os.geteuid() != 0 or not status.st_mode & stat.S_IWGRP:
        return False
    try:
        return bool(os.getxattr(where, _ACL))
    except OSError as exc:
        if exc.errno in (errno.ENODATA, errno.ENOTSUP):
            return False
        raise


def _require_held(path: Path, fd: int) -> None:
    status = os.fstat(fd)
    if status.st_mode & stat.S_IWOTH:
        raise _writable(path)
    if os.geteuid() != 0:
        return
    _require(path, status, f"/proc/self/fd/{fd}")
    for part in _way(path.absolute()):
        _require_part(part, is_needed=stat.S_ISREG(status.st_mode) and status.st_nlink > 0)
    # Nobody else can change a way that has passed: where it leads to what is held, that was not put there by others.
    if not os.path.samestat(path.stat(), status):
        raise ConfigError(f"{path} was replaced while it was checked", reason="unsafe-config", hint="Try again.")


def _way(path: Path) -> Iterator[Path]:
    """Yield a path with everything that leads to it: directories, links, and the way of what these name."""
    for part in (*reversed(path.parents), path):
        yield part
        if part.is_symlink():
            yield from _way(part.parent / part.readlink())


def _require_part(part: Path, *, is_needed: bool) -> None:
    try:
        status = part.lstat()
    except FileNotFoundError:  # what a link of /proc/PID/fd names need not be a path
        if is_needed:
            raise
        return
    _require(part, status, part)


def _require(part: Path, status: os.stat_result, where: str | Path) -> None:
    if status.st_uid not in (0, os.geteuid()) and not _is_unmapped(status.st_uid):
        raise ConfigError(
            f"{part} belongs to user {status.st_uid}, who can change what a daemon of root is told",
            reason="unsafe-config",
            hint=f"`chown root {part}` after a look at what is in it, or keep the configuration below /etc/hookd.",
        )
    if stat.S_ISLNK(status.st_mode) or (stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX):
        return
    if written_by_others(status) and not (stat.S_ISDIR(status.st_mode) and is_projected(part)):
        raise _writable(part)
    if written_through_acl(status, where):
        raise _listed(part)


def _writable(part: Path) -> ConfigError:
    return ConfigError(
        f"other users can write to {part}, and so change what the daemon is told",
        reason="unsafe-config",
        hint=f"`chmod go-w {part}`, and look at what is in it.",
    )


def _listed(part: Path) -> ConfigError:
    return ConfigError(
        f"an access control list lets others write to {part}, and so change what the daemon is told",
        reason="unsafe-config",
        hint=f"`setfacl -b {part}`, and look at what is in it.",
    )


def _is_unmapped(uid: int) -> bool:
    """Whether this uid stands for all users outside of our user namespace, the root of the machine among them."""
    if uid != int(Path("/proc/sys/kernel/overflowuid").read_text()):
        return False
    ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return not any(int(first) <= uid < int(first) + int(count) for first, _, count in ranges)
