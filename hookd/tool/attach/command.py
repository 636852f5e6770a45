"""Exec the command of `hookd run`, and leave a companion process behind that serves it and cleans up.

The command keeps our pid, so its exit code, signals, process group, terminal and streams are its own. The companion is not a child of
the command (a command may wait for all its children), has its own session, and closes all inherited descriptors except stderr,
where it reports at the end of the command. If we are the first process of a container, or a subreaper, the companion is a child of
the command nevertheless, and ends with the container.
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
    """Exec a command whose training processes get an agent.

    The calling process must have only one thread.

    Args:
        command: program and arguments.
        request: what to observe.
        beside: context manager that runs in the companion. It is entered with our pid before the command runs, and left when the
            command has ended, before its payload is removed. If the command cannot be run, it is left by SystemExit.
            `Launch.failures` returns what went wrong.

    Raises:
        UsageError: reason "command-not-found".
        PluginError: a plugin is unknown.
        HookdError: raised by `beside` on entry.
    """
    path = _find(command[0])
    _occupy_standard_streams()
    prepared = launch.prepare(request, _environment())
    channel = _leave_companion(prepared, beside)
    try:
        _wait_until_ready(channel)
        WAITERS.close()  # the command must not inherit children
        _become(path, list(command), prepared.env)
    except BaseException:
        with contextlib.suppress(OSError):
            channel.send("not run")
        raise


def _wait_until_ready(channel: Connection) -> None:
    try:
        problem = channel.recv()
    except EOFError:
        raise HookdError("hookd's helper process has ended; its error is above") from None
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
        errno.ENOEXEC: "It is neither a script nor a program for this machine.",
    }.get(code, "")
    return UsageError(f"cannot run {name}: {os.strerror(code)}", reason="command-not-found", hint=hint)


def _occupy_standard_streams() -> None:
    """Open /dev/null on closed standard streams, so that no file of ours gets their numbers, which the companion redirects.

    In the command these streams stay closed.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        pass
    os.close(fd)


def _environment() -> dict[str, str]:
    """Return our initial environment: in the C locale Python adds LC_CTYPE to its own (PEP 538)."""
    environment = dict(os.environ)
    with contextlib.suppress(OSError):
        if b"\0LC_CTYPE=" not in b"\0" + Path("/proc/self/environ").read_bytes():
            environment.pop("LC_CTYPE", None)
    return environment


def _become(path: str, command: list[str], env: dict[str, str]) -> NoReturn:
    # Python ignores these two signals; a command started from a shell has the default actions.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    try:
        try:
            os.execve(path, command, env)  # noqa: S606
        except OSError as exc:
            if exc.errno != errno.ENOEXEC or not _is_text(path):
                raise
            # A script without a shebang line: shells run it themselves.
            os.execve(_SHELL, [_SHELL, path, *command[1:]], env)  # noqa: S606
    except OSError as exc:
        raise _cannot(command[0], exc.errno or errno.ENOEXEC) from exc


def _is_text(path: str) -> bool:
    """Whether a shell would run a file as a script: bash looks for a NUL in line 1 (execute_cmd.c, 5.2)."""
    with open(path, "rb") as file:  # noqa: PTH123
        return b"\0" not in file.read(80).partition(b"\n")[0]


def _leave_companion(prepared: Launch, beside: Beside) -> Connection:
    """Start the companion as an orphaned grandchild.

    It answers once on the returned channel, with an error or None.
    """
    ours, its = Pipe()
    us = _Command(os.getpid())
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    # Signals stay blocked in the companion: a signal to all processes ends the command, and thereby the companion.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    child = os.fork()
    if not child:
        try:
            os.setsid()
            if not os.fork():
                _watch(us, prepared, beside, its)
        except BaseException:  # noqa: BLE001  the child must not continue as the command
            traceback.print_exc()
        finally:
            os._exit(0)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    with contextlib.suppress(ChildProcessError):  # if SIGCHLD is ignored, the kernel reaps the child
        os.waitpid(child, 0)
    its.close()
    return ours


def _watch(command: _Command, prepared: Launch, beside: Beside, channel: Connection) -> None:
    """Run as the companion until the command ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _close_inherited({channel.fileno(), prepared.lock, command.pidfd})
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


def _close_inherited(needed: set[int]) -> None:
    """Close all inherited descriptors: another process may wait for the command to close or unlock them."""
    _null(_STDIN, _STDOUT)
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  names only
        if int(name) > _STDERR and int(name) not in needed:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _null(*descriptors: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(null, descriptor)
    os.close(null)


class _Command:
    """The process that will become the command, which is not a child of the companion.

    Attributes:
        pidfd: readable once all threads of the process have ended; -1 if the kernel has no pidfds (before Linux 5.3).
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.pidfd = -1
        self._ticks = proc.start_ticks(pid)
        with contextlib.suppress(OSError, AttributeError):
            self.pidfd = os.pidfd_open(pid)

    def wait(self) -> None:
        """Wait for the end of the process, whether or not its parent has reaped it."""
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
