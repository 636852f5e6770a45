"""Test on a child process that ptrace works: some sandboxes only pretend to support it.

Runs in the injector. In known cases an injected mmap returns an address at which nothing is mapped, or /proc/PID/mem is
missing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time

from hookd.errors import AttachError, HookdError, PermissionDenied
from hookd.tool.inject import interpreter, ptrace
from hookd.tool.linux import permission, proc
from hookd.tool.linux.memory import Opened

_SIZE = 8192
_DIE_WITH_PARENT = 1


def check() -> None:
    """Stop a forked child, map memory in it, write and read this memory, and resume the child.

    The injector calls this before each job. This also warms up all its code: a first run takes twice as long. The injector has
    one thread, so that forking is safe.

    Raises:
        PermissionDenied: reason "ptrace-broken", "ptrace-refused" or "seccomp".
    """
    child = os.fork()
    if child == 0:
        _wait_forever()
    try:
        _exercise(child)
    except OSError as exc:
        if exc.errno == errno.ENOSYS:
            raise permission.forbidden(exc) from exc
        raise PermissionDenied(f"ptrace is refused here: {exc}", reason="ptrace-refused", hint=_HINT) from exc
    except HookdError as exc:
        raise PermissionDenied(f"ptrace is broken here: {exc}", reason="ptrace-broken", hint=_HINT) from exc
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)


_HINT = "Run hookd outside this sandbox, or start the training with `hookd run -- ...`."


def _wait_forever() -> None:
    try:
        proc.libc().prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
        while True:
            time.sleep(3600)
    finally:
        os._exit(1)


def _exercise(child: int) -> None:
    with Opened(child, proc.program(child)) as memory:
        # The child is a copy of this process, with the same symbols.
        libc = interpreter.find_libc(memory, memory.mappings())
        thread = ptrace.thread(memory, libc.returns)
        thread.stop(2.0)
        try:
            address = thread.map_memory(libc.symbols["mmap"], _SIZE)
            memory.write(address, b"hookd")
            thread.call(libc.symbols["munmap"], address + _SIZE // 2, _SIZE // 2)
        finally:
            thread.release()
        ends = [m.end for m in memory.mappings() if m.start <= address < m.end]
        if ends != [address + _SIZE // 2] or memory.read(address, 5) != b"hookd":
            raise AttachError("memory that ptrace mapped is missing", reason="ptrace-broken")
