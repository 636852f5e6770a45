"""`hookd run -- COMMAND`: start a command so that each training process in it has an agent from its first step.

The command finds a `sitecustomize` of ours through PYTHONPATH (see `_site/sitecustomize.py`). hookd need not be
installed in its environment, and nothing is installed there. Tool side.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hookd.attach import payload
from hookd.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hookd.attach.request import AttachRequest

_PREFIX = "hookd-run-"
_STARTING_S = 60.0
"""So long after it was made, a directory may belong to somebody who has not locked it yet."""
_SITE = Path(__file__).parent / "_site" / "sitecustomize.py"
_PASSED_ON = {
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGWINCH,
}
_FROM_TERMINAL = 0x80


@dataclass(frozen=True)
class Launch:
    """What a command needs to be observed from its start.

    Attributes:
        env: its environment.
        directory: where the payload lies; private to this user.
        lock: held as long as we live.
    """

    env: dict[str, str]
    directory: Path
    lock: int

    def failures(self) -> dict[int, str]:
        """Give, by pid, why the agent did not start in a process of the command."""
        return {
            int(path.name.partition("-")[2]): path.read_text("utf-8", "replace")[:1000]
            for path in sorted(self.directory.glob("failed-*"))
        }

    def cleanup(self) -> None:
        """Remove the directory; processes of the command that start later are not observed."""
        shutil.rmtree(self.directory, ignore_errors=True)
        os.close(self.lock)


def prepare(request: AttachRequest, base_env: Mapping[str, str]) -> Launch:
    """Lay the payload ready for a command. The caller calls `cleanup` when the command has ended.

    Where the caller was killed, the next call of this function removes what it has left.

    Args:
        request: what to observe; its timeout, lease and `force` play no part.
        base_env: the environment to start from.

    Raises:
        PluginError: a plugin is unknown.
    """
    built = payload.build(request.plugins, request.plugin_dirs)
    _remove_abandoned()
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX))
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
    (directory / "payload.zip").write_bytes(built.archive)
    (directory / "arrival.py").write_bytes(payload.arrival()[0])
    (directory / "config.json").write_text(json.dumps(config), "utf-8")
    (directory / "site").mkdir()
    shutil.copyfile(_SITE, directory / "site" / "sitecustomize.py")
    return Launch(environment(directory, base_env), directory, lock)


def _remove_abandoned() -> None:
    """Remove the directories of those who were killed: nobody holds their lock."""
    for directory in Path(tempfile.gettempdir()).glob(_PREFIX + "*"):
        with contextlib.suppress(OSError):
            status = directory.lstat()
            is_starting = time.time() - status.st_mtime < _STARTING_S
            if status.st_uid == os.geteuid() and not is_starting and (lock := _locked(directory)) is not None:
                shutil.rmtree(directory, ignore_errors=True)
                os.close(lock)


def _locked(directory: Path) -> int | None:
    """Take the lock of a directory; None where somebody holds it."""
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def environment(directory: Path, base_env: Mapping[str, str]) -> dict[str, str]:
    """Give the environment in which every Python finds what lies in `directory`: one more entry in PYTHONPATH."""
    paths = [str(directory / "site")]
    if base_env.get("PYTHONPATH"):
        paths.append(base_env["PYTHONPATH"])
    return {**base_env, "PYTHONPATH": os.pathsep.join(paths)}


def is_launched(environment: Mapping[str, str]) -> bool:
    """Whether a process with this environment belongs to a command of `hookd run`."""
    entries = map(Path, environment.get("PYTHONPATH", "").split(os.pathsep))
    return any(entry.name == "site" and entry.parent.name.startswith(_PREFIX) for entry in entries)


def run(
    command: Sequence[str],
    request: AttachRequest,
    *,
    started: Callable[[int, Launch], None] | None = None,
    ended: Callable[[Launch], None] | None = None,
) -> int:
    """Run a command to its end as if it had been started directly; in the main thread.

    It has our stdin, stdout, stderr and process group; signals sent to us go to it (those from the terminal reach it
    anyhow). Signals are blocked while it runs, and so in threads that `started` starts.

    Args:
        command: program and arguments.
        request: what to observe.
        started: called with its pid when it runs.
        ended: called when it has ended, before its payload is removed; `Launch.failures` tells what went wrong.

    Returns:
        Its exit code; 128 + N if signal N ended it.

    Raises:
        UsageError: reason "command-not-found".
        PluginError: a plugin is unknown.
    """
    launch = prepare(request, os.environ)
    watched = _PASSED_ON | {signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    try:
        pid = _spawn(command, launch.env, before)
        if started is not None:
            started(pid, launch)
        code = _wait(pid, watched)
        if ended is not None:
            ended(launch)
        return code
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        launch.cleanup()


def _spawn(command: Sequence[str], env: dict[str, str], mask: set[int | signal.Signals]) -> int:
    ours = [s for s in (signal.SIGPIPE, signal.SIGXFSZ) if signal.getsignal(s) == signal.SIG_IGN]
    try:
        # Python ignores SIGPIPE and SIGXFSZ for itself; a command started from a shell has the defaults.
        return os.posix_spawnp(command[0], list(command), env, setsigmask=mask, setsigdef=ours)
    except OSError as exc:
        reason = "command-not-found"
        raise UsageError(f"cannot run {command[0]}: {exc.strerror}", reason=reason) from exc


def _wait(pid: int, watched: set[signal.Signals]) -> int:
    """Pass signals on until the command ends."""
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        info = signal.sigwaitinfo(watched)
        if info.si_signo in _PASSED_ON and info.si_code != _FROM_TERMINAL:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, info.si_signo)
