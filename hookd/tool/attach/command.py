"""Become the command of `hookd run`, and leave a watcher behind that serves it and tidies up after it. Tool side.

The command has our pid, so its exit code, signals, process group, terminal and streams are its own by construction. The
watcher is no child of it (a command may wait for all that it has), has left its session, and holds nothing of what it
inherited but stderr, for a last word once the command has ended. Where we are the first process of a container, or a
subreaper, it is a child of the command all the same, and ends with the container.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import shutil
import signal
import sys
import time
import traceback
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hookd.errors import HookdError, UsageError
from hookd.tool.attach import launch
from hookd.tool.linux import proc
from hookd.tool.linux.waiter import WAITERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from multiprocessing.connection import Connection

    from hookd.tool.attach.launch import Launch
    from hookd.tool.attach.request import AttachRequest

    Beside = Callable[[int, Launch], AbstractContextManager[None]]

_POLL_S = 0.1
_SHELL = "/bin/sh"
_STDIN, _STDOUT, _STDERR = range(3)


@contextlib.contextmanager
def _nothing(pid: int, prepared: Launch) -> Iterator[None]:  # noqa: ARG001
    yield


def run(command: Sequence[str], request: AttachRequest, beside: Beside = _nothing) -> NoReturn:
    """Become a command; its training processes have an agent. In a process with one thread.

    Args:
        command: program and arguments.
        request: what to observe.
        beside: entered in the watcher with our pid before the command runs, and left when it has ended, before its
            payload is removed; left by SystemExit where it cannot be run. `Launch.failures` tells what went wrong.

    Raises:
        UsageError: reason "command-not-found".
        PluginError: a plugin is unknown.
        HookdError: what `beside` raised at its beginning.
    """
    path = _find(command[0])
    _occupy_standard_streams()
    prepared = launch.prepare(request, _environment())
    channel = _leave_watcher(prepared, beside)
    try:
        _wait_until_ready(channel)
        WAITERS.close()  # the command is to have no child that it did not start
        _become(path, list(command), prepared.env)
    except BaseException:
        with contextlib.suppress(OSError):
            channel.send("not run")
        raise


def _wait_until_ready(channel: Connection) -> None:
    try:
        problem = channel.recv()
    except EOFError:
        raise HookdError("what was to serve the command has ended; its error is above") from None
    if problem is not None:
        raise problem


def _find(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        code = errno.EISDIR if Path(name).is_dir() else errno.EACCES if Path(name).exists() else errno.ENOENT
        raise _cannot(name, code if "/" in name else errno.ENOENT)
    return path


def _cannot(name: str, code: int) -> UsageError:
    hint = {
        errno.EACCES: f"chmod +x {name}, or name what is to run it: hookd run -- python {name}",
        errno.ENOEXEC: "It is no script, and no program for this machine.",
    }.get(code, "")
    return UsageError(f"cannot run {name}: {os.strerror(code)}", reason="command-not-found", hint=hint)


def _occupy_standard_streams() -> None:
    """Keep closed standard streams from becoming files of ours, which the watcher would lose. The command's stay closed."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        pass
    os.close(fd)


def _environment() -> dict[str, str]:
    """Give the environment that we were given: Python adds LC_CTYPE to its own in the C locale (PEP 538)."""
    found = dict(os.environ)
    with contextlib.suppress(OSError):
        if b"\0LC_CTYPE=" not in b"\0" + Path("/proc/self/environ").read_bytes():
            found.pop("LC_CTYPE", None)
    return found


def _become(path: str, command: list[str], env: dict[str, str]) -> NoReturn:
    # Python ignores these two for itself; a command started from a shell has the defaults.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    try:
        try:
            os.execve(path, command, env)  # noqa: S606
        except OSError as exc:
            if exc.errno != errno.ENOEXEC or not _is_text(path):
                raise
            # A script whose first line does not say who runs it: shells do.
            os.execve(_SHELL, [_SHELL, path, *command[1:]], env)  # noqa: S606
    except OSError as exc:
        raise _cannot(command[0], exc.errno or errno.ENOEXEC) from exc


def _is_text(path: str) -> bool:
    """Whether a shell takes a file for a script: bash looks for a NUL in the first line (execute_cmd.c, 5.2)."""
    with open(path, "rb") as file:  # noqa: PTH123
        return b"\0" not in file.read(80).partition(b"\n")[0]


def _leave_watcher(prepared: Launch, beside: Beside) -> Connection:
    """Start the watcher as a grandchild whose parent is gone. It answers once with what went wrong, or None."""
    ours, its = Pipe()
    us = _Command(os.getpid())
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    # In the watcher they stay so: who signals all that there is ends the command, and by that the watcher.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    child = os.fork()
    if not child:
        try:
            os.setsid()
            if not os.fork():
                _watch(us, prepared, beside, its)
        except BaseException:  # noqa: BLE001  it must not go on as the command
            traceback.print_exc()
        finally:
            os._exit(0)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    with contextlib.suppress(ChildProcessError):  # whoever ignores SIGCHLD need not wait
        os.waitpid(child, 0)
    its.close()
    return ours


def _watch(command: _Command, prepared: Launch, beside: Beside, channel: Connection) -> None:
    """Be the watcher, to the command's end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _let_go({channel.fileno(), prepared.lock, command.pidfd})
    try:
        with beside(command.pid, prepared):
            channel.send(None)
            with contextlib.suppress(EOFError):  # exec closes the other end
                channel.recv()
                sys.exit()
            command.wait()
        _null(_STDERR)
    except HookdError as exc:
        channel.send(exc)
    except SystemExit:
        pass
    finally:
        prepared.cleanup()


def _let_go(kept: set[int]) -> None:
    """Close what we have inherited: somebody may wait for the command to close it, or lock it."""
    _null(_STDIN, _STDOUT)
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  names only
        if int(name) > _STDERR and int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _null(*descriptors: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(null, descriptor)
    os.close(null)


class _Command:
    """A process that is no child of ours, from before it becomes the command.

    Attributes:
        pidfd: readable once it has ended, all threads of it; -1 where the kernel has none (before Linux 5.3).
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.pidfd = -1
        self._ticks = proc.start_ticks(pid)
        with contextlib.suppress(OSError, AttributeError):
            self.pidfd = os.pidfd_open(pid)

    def wait(self) -> None:
        """Wait for its end, whether its parent has asked for its exit code or not."""
        if self.pidfd >= 0:
            waiting = select.poll()
            waiting.register(self.pidfd, select.POLLIN)
            waiting.poll()
        while self._is_running():
            time.sleep(_POLL_S)

    def _is_running(self) -> bool:
        try:
            return proc.is_running(self.pid, self._ticks)
        except OSError:
            return False
