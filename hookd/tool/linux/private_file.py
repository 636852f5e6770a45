"""Write a file that only its owner can read, and that replaces the old one as a whole."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: Path, part: Path | None = None) -> Iterator[BinaryIO]:
    """Yield a file that replaces `path` if the block succeeds, and is removed if it fails.

    Only its owner can read it, whatever the umask. A concurrent reader gets the old file or the new one.

    Args:
        path: to replace.
        part: the file until then, in the same directory. By default its name is unique to this process; a fixed one lets the
            next process remove the file of a process that was killed.
    """
    part = part or path.with_name(f".{path.name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)  # of a killed process
    try:
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
