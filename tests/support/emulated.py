"""Whether an emulator of single programs runs the tests (qemu-user), and what cannot be tested then."""

from __future__ import annotations

import os
import threading

import pytest

REASONS = {
    "proc": "emulated: for other processes, /proc shows the emulator: its program, its command line, its memory",
    "environ": "emulated: the emulator starts no program with an environment of megabytes",
    "ptrace": "emulated: there is no ptrace",
    "time": "emulated: takes ten to thirty times as long",
    "madvise": "emulated: the emulator says that it has read the pages of a file (MADV_POPULATE_READ), and has not",
    "memory": "emulated: the emulator's own memory is part of the process",
    "limit": "emulated: the emulator does not limit the address space of what it runs",
    "spawn": "emulated: a program that is not there is started, and ends with exit code 127",
}


def _is_emulated() -> bool:
    """Compare two names of this program's file, of which the emulator answers only the first itself."""
    own = f"/proc/self/task/{threading.get_native_id()}/exe"
    try:
        return os.readlink("/proc/self/exe") != os.readlink(own)
    except OSError:
        return False


IS_EMULATED = _is_emulated()


def lacks(what: str) -> pytest.MarkDecorator:
    """Skip tests that need something which an emulator lacks, one of REASONS."""
    return pytest.mark.skipif(IS_EMULATED, reason=REASONS[what])
