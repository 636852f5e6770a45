"""A target in a container: other namespaces and another file system, made from the host's own by hand."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hookd.tool.linux.proc import read
from tests.support import stub
from tests.support.environment import TARGETS, bare_python, target_environment
from tests.support.processes import Process, wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence

INIT = Path(__file__).with_name("container_init.py")
ALL = ("uts", "ipc", "pid", "net")
TMPFS = ("/tmp", "/var/tmp", "/run", "/dev/shm", "/home")  # noqa: S108


@dataclass(frozen=True)
class Box:
    """The description of a container.

    Attributes:
        root: the directory that becomes its root, with everything that is mounted below it.
        read_only: whether its file system is read-only, except for tmpfs at `writable`.
        writable: which of the tmpfs can be written; /tmp, /var/tmp, /run, /dev/shm, /root and /home are always tmpfs.
        namespaces: its namespaces besides that of mounts.
        user: the host's user who is root in it, in a user namespace of its own; 0 for none.
        uid: the user that runs the command, in the container's numbers.
        proc: whether /proc is mounted.
        proc_options: the options of that mount.
        python: the container's interpreter; "" for ours.
        variables: environment variables.
    """

    root: str = "/"
    read_only: bool = True
    writable: tuple[str, ...] = TMPFS
    namespaces: tuple[str, ...] = ALL
    user: int = 0
    uid: int = 0
    proc: bool = True
    proc_options: str = ""
    python: str = ""
    variables: tuple[tuple[str, str], ...] = ()

    def start(self, directory: Path, command: Sequence[str | Path], see: Sequence[Path], **extra: str) -> Process:
        """Start a command; `see` are the host's directories that stay where they are."""
        mount_point = directory / "root"
        mount_point.mkdir(exist_ok=True)
        for path in (directory, *see):
            path.chmod(path.stat().st_mode | 0o555)
        spec = asdict(self) | {
            "mount_point": str(mount_point),
            "visible": [(str(path), str(path)) for path in see],
            "command": [str(word) for word in command],
            "env": target_environment(HOME="/home/user", **extra) | dict(self.variables),
            "cwd": str(see[0]),
        }
        for name in ("TMPDIR", "TEMP", "TMP", "XDG_RUNTIME_DIR"):
            if name not in dict(self.variables):
                spec["env"].pop(name, None)
        (file := directory / "container.json").write_text(json.dumps(spec))
        return Process([sys.executable, INIT, file], env=target_environment(), stdin=True)

    def start_stub(self, directory: Path, body: str) -> Process:
        """Start a target with a stub for torch, and wait until it works."""
        home = directory / "stub"
        if not home.exists():
            stub.torch_directory(directory)
        see = [home] if self.python else [home, *interpreter_homes()]
        command = [self.python or sys.executable, "-c", stub.TRAIN + body]
        process = self.start(directory, command, see, PYTHONPATH=str(home))
        process.expect("^ready$")
        return process

    def start_training(self, directory: Path) -> Process:
        """Start tests/targets/puppet.py with the real torch, and wait until it trains; `quit` ends it.

        It gets a directory for torch's cache: without one, torch does not start where nothing is writable.
        """
        home, targets = bare_python().parents[1], own_targets(directory)
        see = [targets] if self.python else [targets, home, *interpreter_homes()]
        command = [self.python or bare_python(), targets / "puppet.py"]
        process = self.start(directory, command, see, TORCHINDUCTOR_CACHE_DIR=str(targets))
        process.expect("^ready$")
        return process

    def but(self, **changes: object) -> Box:
        """Return a copy with changes."""
        return replace(self, **changes)  # type: ignore[arg-type]


def own_targets(directory: Path) -> Path:
    """Return a copy of tests/targets that no other test's processes use: whatever appears there comes from this one."""
    return shutil.copytree(TARGETS, directory / "targets", dirs_exist_ok=True)


def interpreter_homes() -> list[Path]:
    """Return the directories that our interpreter and its packages need, if a container hides them."""
    return [Path(path) for path in dict.fromkeys((sys.prefix, sys.base_prefix)) if not path.startswith("/usr")]


def target_of(process: Process) -> int:
    """Return the pid, as we see it, of the command in a container: the last one of the chain of children."""
    pid = process.pid
    while children := read(pid, f"task/{pid}/children").split():
        pid = int(children[-1])
    return pid


def init_of(process: Process) -> int:
    """Return the pid of process 1 of a container."""
    return int(read(target_of(process), "stat").rpartition(b")")[2].split()[1])


def has_ended(pid: int) -> bool:
    return wait_until(lambda: not Path(f"/proc/{pid}").exists())
