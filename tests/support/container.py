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
    """What a container is like.

    Attributes:
        root: the directory that becomes its root, with everything mounted below.
        read_only: whether all of it is, except tmpfs on `writable`.
        writable: which of the tmpfs can be written; /tmp, /var/tmp, /run, /dev/shm, /root and /home are always tmpfs.
        namespaces: beside that of mounts.
        user: the host's user who is root in it, in a user namespace of its own; 0 for none.
        uid: as whom the command runs, in the container's numbers.
        proc: whether /proc is mounted.
        proc_options: for that mount.
        python: the container's interpreter; "" for ours.
        variables: of the environment.
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

        Without a directory for its cache torch itself would not start where it can write nowhere.
        """
        home, targets = bare_python().parents[1], own_targets(directory)
        see = [targets] if self.python else [targets, home, *interpreter_homes()]
        command = [self.python or bare_python(), targets / "puppet.py"]
        process = self.start(directory, command, see, TORCHINDUCTOR_CACHE_DIR=str(targets))
        process.expect("^ready$")
        return process

    def but(self, **changes: object) -> Box:
        """Return one that differs."""
        return replace(self, **changes)  # type: ignore[arg-type]


def own_targets(directory: Path) -> Path:
    """Return a copy of tests/targets in which no other test's processes work: what appears there is this one's."""
    return shutil.copytree(TARGETS, directory / "targets", dirs_exist_ok=True)


def interpreter_homes() -> list[Path]:
    """Return the directories that our interpreter and its packages need, as far as a container hides them."""
    return [Path(path) for path in dict.fromkeys((sys.prefix, sys.base_prefix)) if not path.startswith("/usr")]


def target_of(process: Process) -> int:
    """Return the pid, as we see it, of the command in a container: the last of the line."""
    pid = process.pid
    while children := read(pid, f"task/{pid}/children").split():
        pid = int(children[-1])
    return pid


def init_of(process: Process) -> int:
    """Return the pid of process 1 of a container."""
    return int(read(target_of(process), "stat").rpartition(b")")[2].split()[1])


def has_ended(pid: int) -> bool:
    return wait_until(lambda: not Path(f"/proc/{pid}").exists())
