"""Puts a bundle into a directory of its own: a name nobody has had, the owner's alone, there as a whole or not at all.

Runs in the target, in hookd's own thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookd_nan.bundle import tensorfile

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import BinaryIO

    from torch import Tensor

FILES = TENSORS, TEXT = "tensors.safetensors", "bundle.json"
_SPARE = 16 << 20


def directories() -> Iterator[Path]:
    """Give where bundles go if nobody says: the place for a program's state, or else for temporary files."""
    state = os.environ.get("XDG_STATE_HOME")
    with contextlib.suppress(RuntimeError):  # a user without a home
        yield (Path(state) if state else Path.home() / ".local" / "state") / "hookd" / "bundles"
    yield Path(tempfile.gettempdir()) / f"hookd-{os.getuid()}" / "bundles"


def prepare(directory: Path) -> Path:
    """Make a directory where there is none, the owner's alone, and see whether it can be written to.

    Raises:
        OSError: it cannot.
    """
    directory = directory.expanduser().absolute()
    for one in (*reversed(directory.parents), directory):  # `parents=True` would leave those above to the umask
        if not one.exists():
            one.mkdir(mode=0o700, exist_ok=True)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError(13, "not writable", str(directory))
    return directory


def free_name(directory: Path, *parts: object) -> Path:
    """Give a path in a directory that nothing has yet, its name made of these parts and the time."""
    text = "-".join(re.sub(r"[^A-Za-z0-9._]+", "_", str(part))[:60].strip("_.") for part in parts)
    path = base = directory / f"hookd-{text}-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}"
    number = 1
    while os.path.lexists(path):
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


def write(path: Path, text: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
    """Write a bundle under another name, and give it its own when all of it is on the disk.

    Returns:
        How many bytes it has.

    Raises:
        OSError: there is no room, or the file system refuses; nothing is left behind.
    """
    needed = sum(one.numel() * one.element_size() for one in tensors.values())
    if shutil.disk_usage(path.parent).free < needed + _SPARE:
        raise OSError(28, f"less than {needed + _SPARE} bytes are free", str(path.parent))
    part = path.with_name(f".{path.name}.part")
    part.mkdir(mode=0o700)
    try:
        with _created(part / TENSORS) as file:
            tensorfile.write(file, tensors)
        with _created(part / TEXT) as file:
            file.write(json.dumps(text, indent=1, allow_nan=False, default=str).encode())
        size = sum((part / name).stat().st_size for name in FILES)
        part.rename(path)  # fails where anything but an empty directory has that name meanwhile
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return size


@contextlib.contextmanager
def _created(path: Path) -> Iterator[BinaryIO]:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
