"""A real training, placed where a Python of another root can read it, and what may not be left of an agent in it."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from hookd.tool.linux import proc
from tests.support.environment import TARGETS, target_environment
from tests.support.processes import PATIENCE_S, Process, wait_until
from tests.support.tool import Attachment, plugin_options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.support.interpreters import Interpreter

SHARED_DIRECTORIES = ("tmp", "dev/shm", "var/tmp", "run")
"""Where hookd puts a file for a moment, below the target's root."""


class Training:
    """`tests/targets/mlp.py` on some Python, with and without hookd.

    Args:
        command: what starts a script on it, up to the script.
        home: a directory for the script, as we see it.
        inside: the same directory, as that Python sees it.
    """

    def __init__(self, command: Sequence[str | Path], home: Path, inside: Path | None = None) -> None:
        for name in ("mlp.py", "_steps.py"):
            shutil.copy(TARGETS / name, home)
        self._command = [*command, (inside or home) / "mlp.py", "--steps", "1500"]
        self._home = home

    def start(self, *more: str) -> Process:
        return Process([*self._command, *more], env=target_environment(), cwd=self._home)

    def checksum(self) -> str:
        """Return the closing line of a run that nobody attaches to."""
        with self.start() as process:
            return process.finish(4 * PATIENCE_S)[-1]


@contextlib.contextmanager
def training_on(python: Interpreter) -> Iterator[Training]:
    with python.directory() as home:
        yield Training(python.command, home, python.inside(home))


@contextlib.contextmanager
def watched(
    training: Training, *plugins: str, pid_of: Callable[[Process], int] = lambda one: one.pid
) -> Iterator[Attachment]:
    """Attach to a run and wait for some steps; at the end detach, and check that it goes as one that nobody watched.

    Args:
        training: what is run, once without hookd.
        plugins: names of those to load.
        pid_of: finds the target, given what was started.
    """
    plain = training.checksum()
    with training.start("--pause", "0.01") as started:
        started.expect("^step 20 ")
        pid = pid_of(started)
        with Attachment([pid], *plugin_options(plugins)) as attachment:
            wait_until(lambda: attachment.metrics().total("hookd_steps_total") > 3, what="steps are counted")
            yield attachment
            attachment.detach()
        assert_nothing_is_left(pid)
        assert started.finish()[-1] == plain


def assert_nothing_is_left(pid: int) -> None:
    """Check that no thread, memory, descriptor or file of an agent is left in a process that goes on."""
    wait_until(
        lambda: not [name for name in _threads(pid) if name.startswith("hookd")], what=lambda: str(_threads(pid))
    )
    links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    opened = [Path(path).name for path in (*links, *(one.path for one in proc.maps(pid)))]
    assert not [name for name in opened if "hookd" in name]
    assert not _files(pid)


def _threads(pid: int) -> list[str]:
    return [one.read_text().strip() for one in Path(f"/proc/{pid}/task").glob("*/comm")]


def _files(pid: int) -> list[Path]:
    """Return the files that an agent of this process has made: its pid is in the names.

    Older ones are of an earlier process of the same pid: a test that kills its target leaves them behind.
    """
    inside, since = (
        proc.status(pid).nspid,
        psutil.Process(pid).create_time() - 1,
    )  # the kernel rounds its own start to 1 s
    homes = [Path(f"/proc/{pid}/root") / directory for directory in SHARED_DIRECTORIES]
    found = [file for home in homes if home.is_dir() for file in home.glob(f"hookd-{inside}-*")]
    return [file for file in found if file.lstat().st_mtime >= since]
