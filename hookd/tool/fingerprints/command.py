"""Record the fingerprints of all training processes of a command, each from its first step on."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING

from hookd.errors import HookdError
from hookd.tool.attach import discover
from hookd.tool.config import PluginSpec
from hookd.tool.fingerprints.recording import NAME, follow
from hookd.tool.linux import proc

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from pathlib import Path

    from hookd.tool.fingerprints.recording import Recorded

POLL_S, END_S = 0.05, 2.0
OPTIONS = {"every": "1", "buffer": "64"}
"""Of the plugin: the first steps are kept until this process reads."""


def with_plugin(specs: Sequence[PluginSpec]) -> tuple[PluginSpec, ...]:
    """Return the plugins of a command with that of the fingerprint, which may be among them with options."""
    given = next((spec.options for spec in specs if spec.name == NAME), {})
    return (*(spec for spec in specs if spec.name != NAME), PluginSpec(NAME, {**OPTIONS, **given}))


def require_writable(path: Path) -> None:
    """Check that a file can be written, before anything is started.

    Raises:
        HookdError: reason "cannot-write": it exists, or its directory does not let us.
    """
    why = (
        "it is a directory"
        if path.is_dir()
        else "it exists"
        if path.exists()
        else "its directory does not exist"
        if not path.absolute().parent.is_dir()
        else ""
        if os.access(path.absolute().parent, os.W_OK)
        else "its directory cannot be written to"
    )
    if why:
        raise HookdError(f"cannot write {path}: {why}", reason="cannot-write", hint="Choose another file.")


@contextlib.contextmanager
def recording(pids: Collection[int], path: Path, *, max_bytes: int, say: Callable[[str], None]) -> Iterator[None]:
    """Record the processes during the block: rank 0 in `path`, and others in files with their rank before the suffix.

    Args:
        pids: those of the command, looked up again and again.
        path: of the file.
        max_bytes: largest size of each file.
        say: prints a message.
    """
    over, known, taken = threading.Event(), set[int](), set["Path"]()
    threads: list[threading.Thread] = []

    def record(pid: int, to: Path) -> None:
        try:
            say(message(to, follow(pid, to, max_bytes=max_bytes, is_over=lambda _: over.is_set())))
        except HookdError as error:
            why = "it has ended before its first step" if error.reason == "gone" and ends(pid) else error.message
            say(f"hookd: process {pid} is not recorded: {why}")

    def ends(pid: int) -> bool:
        """Wait for the end of a process whose agent has closed its socket, which is an act of the interpreter's exit."""
        deadline = time.monotonic() + END_S
        while not proc.has_ended(pid) and time.monotonic() < deadline:
            over.wait(POLL_S)
        return proc.has_ended(pid)

    def look() -> None:
        while not over.wait(POLL_S):
            for pid in set(pids) - known:
                rank = _rank(pid)
                if rank is None:
                    continue
                known.add(pid)
                to = path if not rank else path.with_name(f"{path.stem}-rank{rank}{path.suffix}")
                if to in taken:
                    to = to.with_name(f"{to.stem}-{pid}{to.suffix}")
                taken.add(to)
                threads.append(threading.Thread(target=record, args=(pid, to)))
                threads[-1].start()

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield
    finally:
        over.set()
        looking.join()
        for thread in threads:
            thread.join()


def _rank(pid: int) -> int | None:
    """Return the rank of a process that has an agent; None of any other."""
    try:
        identity = discover.identity(pid)
    except (HookdError, OSError):
        return None
    return int(identity.get("rank") or 0) if identity is not None and identity.get("control") else None


def message(path: Path, recorded: Recorded) -> str:
    """Return what has been recorded, in words."""
    if not recorded.steps:
        return f"{path}: no step was recorded"
    which = (
        f"step {recorded.first}"
        if recorded.steps == 1
        else f"{recorded.steps} steps, {recorded.first} to {recorded.last}"
    )
    text = f"{path}: {which}, {_size(recorded.bytes)}"
    if recorded.lost:
        text += f"; {recorded.lost} steps are missing, since they came faster than they could be written: see --every, --modules"
    if recorded.unread:
        what = "tensor" if recorded.unread == 1 else "tensors"
        text += f"; {recorded.unread} {what} of a step could not be read: sparse, or lost on a device"
    return text


def _size(number: int) -> str:
    return f"{number / (1 << 20):.1f} MiB" if number >= 1 << 19 else f"{number / (1 << 10):.1f} KiB"
