"""Write a bundle to a new directory that only its owner can read, as a whole or not at all.

Runs in hookd's own thread.
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
from typing import TYPE_CHECKING

from hookd_capture.bundle import tensorfile

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import BinaryIO

    from torch import Tensor

    from hookd_capture.bundle.manifest import Manifest

FILES = TENSORS, TEXT = "tensors.safetensors", "bundle.json"
_SPARE = 16 << 20


def directories() -> Iterator[Path]:
    """Yield the default directories for bundles: the one for program state, then the one for temporary files."""
    state = os.environ.get("XDG_STATE_HOME")
    with contextlib.suppress(RuntimeError):  # a user without a home
        yield (Path(state) if state else Path.home() / ".local" / "state") / "hookd" / "bundles"
    yield Path(tempfile.gettempdir()) / f"hookd-{os.getuid()}" / "bundles"


def prepare(directory: Path) -> Path:
    """Create a directory for its owner only, if there is none, and check that it can be written to.

    Raises:
        OSError: it cannot be created or written to.
    """
    directory = directory.expanduser().absolute()
    for one in (*reversed(directory.parents), directory):  # `parents=True` gives parents the umask's mode
        if not one.exists():
            one.mkdir(mode=0o700, exist_ok=True)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError(13, "not writable", str(directory))
    return directory


def free_name(directory: Path, *parts: object) -> Path:
    """Return an unused path in a directory, with a name made of the parts, the time and the process."""
    text = "-".join(re.sub(r"[^A-Za-z0-9._]+", "_", str(part))[:60].strip("_.") for part in parts)
    path = base = directory / f"hookd-{text}-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}"
    number = 1
    while os.path.lexists(path):
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


def write(path: Path, text: Manifest, tensors: Mapping[str, Tensor]) -> int:
    """Write a bundle under a temporary name, and rename it when all of it is on the disk.

    Returns:
        The size of the bundle in bytes.

    Raises:
        OSError: there is not enough space, or the file system refuses; nothing is left behind.
    """
    needed = sum(one.numel() * one.element_size() for one in tensors.values())
    if shutil.disk_usage(path.parent).free < needed + _SPARE:
        raise OSError(28, f"fewer than {needed + _SPARE} bytes are free", str(path.parent))
    part = path.with_name(f".{path.name}.part")
    part.mkdir(mode=0o700)
    try:
        with _created(part / TENSORS) as file:
            tensorfile.write(file, tensors)
        with _created(part / TEXT) as file:
            file.write(json.dumps(text, indent=1, allow_nan=False, default=str).encode())
        size = sum((part / name).stat().st_size for name in FILES)
        part.rename(path)  # fails if that name is taken by now, except by an empty directory
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
