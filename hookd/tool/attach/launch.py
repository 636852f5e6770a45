"""Prepare the command of `hookd run`, so that its training processes have an agent from the first step.

The command finds our `sitecustomize` through PYTHONPATH (see `_site/sitecustomize.py`). hookd need not be installed in the command's
environment, and nothing is installed there.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hookd.errors import UsageError
from hookd.tool.attach import payload, trusted
from hookd.tool.linux import commandline

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hookd.tool.attach.request import AttachRequest

_PREFIX = "hookd-run-"
_STARTING_S = 60.0
"""Age up to which an unlocked directory may belong to a process that has not locked it yet."""
_HERE = Path(__file__).parent
_ELSEWHERE = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108  a private directory below it


@dataclass(frozen=True)
class Launch:
    """A command's environment and payload.

    Attributes:
        env: the command's environment.
        directory: of the payload; private to this user.
        lock: descriptor that holds the directory's lock while any process has it open.
    """

    env: dict[str, str]
    directory: Path
    lock: int

    def failures(self) -> dict[int, str]:
        """Return, by pid, why the agent did not start in a process of the command."""
        return {
            int(path.name.partition("-")[2]): path.read_text("utf-8", "replace")[:1000]
            for path in sorted(self.directory.glob("failed-*"))
        }

    def has_started(self) -> bool:
        """Whether an agent has started, or tried to, in any process of the command."""
        return (self.directory / "started").exists() or bool(self.failures())

    def cleanup(self) -> None:
        """Remove the directory; processes of the command that start later are not observed."""
        shutil.rmtree(self.directory, ignore_errors=True)
        os.close(self.lock)


def prepare(request: AttachRequest, base_env: Mapping[str, str]) -> Launch:
    """Write the payload for a command.

    The caller calls `cleanup` when the command has ended. If the caller is killed, the next call of this function removes its
    directory.

    Args:
        request: what to observe; its timeout, lease and `force` are ignored.
        base_env: the environment to start from.

    Raises:
        PluginError: a plugin is unknown.
        UsageError: reason "no-directory".
    """
    built = payload.build(request.plugins, request.plugin_dirs, trusted.of_target(os.geteuid()))
    _remove_abandoned()
    directory = _make_directory()
    lock = _locked(directory)
    assert lock is not None
    config = {
        "method": "run",
        "run": request.run,
        "rank": None,
        "plugins": list(built.plugins),
        "lease_s": None,
        "budget": request.budget,
        "detail": request.detail,
        "directory": str(directory),
    }
    (directory / "payload").write_bytes(built.archive)
    (directory / "stub.py").write_bytes(payload.stub()[0])
    (directory / "config.json").write_text(json.dumps(config), "utf-8")
    (directory / "site").mkdir()
    shutil.copyfile(commandline.__file__, directory / "commandline.py")
    shutil.copyfile(_HERE / "_site" / "sitecustomize.py", directory / "site" / "sitecustomize.py")
    return Launch(environment(directory, base_env), directory, lock)


def _places() -> Iterator[str]:
    """Return the possible parents of our directory: without a colon, which PYTHONPATH cannot contain."""
    return (place for place in dict.fromkeys((tempfile.gettempdir(), *_ELSEWHERE)) if os.pathsep not in place)


def _make_directory() -> Path:
    for place in _places():
        with contextlib.suppress(OSError):
            return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
    raise UsageError(
        "there is no directory for the files that the command needs",
        reason="no-directory",
        hint=f"Set TMPDIR to a directory that can be written to and has no '{os.pathsep}' in its name.",
    )


def _remove_abandoned() -> None:
    """Remove the directories of killed processes: nobody holds their lock."""
    for directory in (path for place in _places() for path in Path(place).glob(_PREFIX + "*")):
        with contextlib.suppress(OSError):
            status = directory.lstat()
            is_starting = time.time() - status.st_mtime < _STARTING_S
            if status.st_uid == os.geteuid() and not is_starting and (lock := _locked(directory)) is not None:
                shutil.rmtree(directory, ignore_errors=True)
                os.close(lock)


def _locked(directory: Path) -> int | None:
    """Lock a directory and return the lock's descriptor; None if another process holds the lock."""
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def environment(directory: Path, base_env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which every Python finds `directory`: one more entry in PYTHONPATH."""
    paths = [str(directory / "site")]
    if base_env.get("PYTHONPATH"):
        paths.append(base_env["PYTHONPATH"])
    return {**base_env, "PYTHONPATH": os.pathsep.join(paths)}


def is_launched(environment: Mapping[str, str]) -> bool:
    """Whether a process with this environment belongs to a command of `hookd run`."""
    entries = map(Path, environment.get("PYTHONPATH", "").split(os.pathsep))
    return any(entry.name == "site" and entry.parent.name.startswith(_PREFIX) for entry in entries)
