"""Find agents by their pages, and processes that could be attached to. Tool side."""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hookd import page
from hookd.attach import proc
from hookd.errors import HookdError, NoSuchTarget, PageError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

_PAGE_LINK = f"/memfd:{page.NAME}"
_PYTHON = re.compile(r"python|pypy", re.IGNORECASE)
_LIBTORCH = re.compile(r"libtorch[^/]*\.so|/torch/_C\.", re.ASCII)
# What stands in a command line of a process that serves a training process and is none itself.
_NO_TRAINERS = (
    ("multiprocessing.resource_tracker", "multiprocessing's resource tracker"),
    ("multiprocessing.forkserver", "multiprocessing's fork server"),
    ("torch/_inductor/compile_worker", "a compile worker of torch"),
    ("torch._inductor.compile_worker", "a compile worker of torch"),
)
_LAUNCHERS = re.compile(r"(?:^|/)(?:torchrun|accelerate|deepspeed)$|^torch\.distributed\.(?:run|launch|elastic)")
_WORKER = re.compile(r"pt_data_worker|pt_data_pin")


@dataclass(frozen=True)
class Candidate:
    """A process that has torch loaded.

    Attributes:
        start: start time in clock ticks after boot; with the pid it names the process for ever.
        state: "attached" (an agent of ours is there), "attachable", or "skipped" (`why` says why).
    """

    pid: int
    start: int
    cmdline: tuple[str, ...]
    uid: int
    state: Literal["attached", "attachable", "skipped"]
    why: str = ""


_POLL_S = 0.005


def find_page(pid: int) -> int | None:
    """Open the page of the agent in process `pid` for reading; None without an agent. The caller closes it.

    A page that the process has inherited by a fork is not its own and is passed over. Those of all protocols are found.

    Raises:
        NoSuchTarget: there is no such process.
        PermissionError: its descriptors cannot be seen.
    """
    directory = f"/proc/{pid}/fd"
    try:
        numbers = os.listdir(directory)  # noqa: PTH208  names only, in one call
    except (FileNotFoundError, ProcessLookupError) as exc:
        raise NoSuchTarget(f"there is no process {pid}", hint="`hookd ps` lists training processes.") from exc
    for number in numbers:
        if proc.link(pid, f"fd/{number}").startswith(_PAGE_LINK):
            with contextlib.suppress(OSError):
                fd = os.open(f"{directory}/{number}", os.O_RDONLY | os.O_CLOEXEC)
                if _is_own(pid, fd):
                    return fd
                os.close(fd)
    return None


def identity(pid: int) -> dict[str, Any] | None:
    """Read the identity in the page of the agent in process `pid`; None without an agent."""
    fd = find_page(pid)
    if fd is None:
        return None
    reader = page.PageReader(fd, any_protocol=True)
    try:
        return reader.identity()
    finally:
        reader.close()


def settled(pid: int, timeout_s: float) -> dict[str, Any] | None:
    """Wait until an agent in process `pid` is neither coming nor going; give its identity, None without an agent.

    After `timeout_s` it is taken as it is: one in which a call runs that began under it, say.

    Raises:
        NoSuchTarget: the process ended.
    """
    deadline = time.monotonic() + timeout_s
    while (fd := find_page(pid)) is not None:
        reader = page.PageReader(fd, any_protocol=True)
        try:
            if reader.state() in ("running", "exited") or time.monotonic() > deadline:
                return reader.identity()
        finally:
            reader.close()
        time.sleep(_POLL_S)
    return None


def wait_left(pid: int, timeout_s: float) -> bool:
    """Wait until an agent that is leaving process `pid` has gone; its page is the last that it lets go of.

    Returns:
        False where an agent stays: one that is not leaving, or one whose time is over (a call that began under it runs).

    Raises:
        NoSuchTarget: the process ended.
    """
    deadline = time.monotonic() + timeout_s
    while (fd := find_page(pid)) is not None:
        reader = page.PageReader(fd, any_protocol=True)
        try:
            is_leaving = reader.state() in ("detaching", "detached")
        finally:
            reader.close()
        if not is_leaving or time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _is_own(pid: int, fd: int) -> bool:
    try:
        reader = page.PageReader(os.dup(fd), any_protocol=True)
    except PageError:
        return False
    try:
        owner = reader.identity()
        return owner.get("pid") == proc.status(pid).nspid and owner.get("start_ticks") in _own_start_ticks(pid)
    except HookdError:
        return False
    finally:
        reader.close()


def _own_start_ticks(pid: int) -> tuple[int, int]:
    """Give what a process reads as its own start: by the clock of its time namespace; 0 where it has no /proc."""
    return proc.start_ticks(pid) + proc.boot_shift_ticks(pid), 0


def candidates(known: Collection[tuple[int, int]] = ()) -> list[Candidate]:
    """List the processes that have torch loaded, in order of pid.

    Args:
        known: pairs of pid and start that need not be looked at again.
    """
    return [found for pid in _pids() if (found := inspect(pid, known)) is not None]


def inspect(pid: int, known: Collection[tuple[int, int]] = ()) -> Candidate | None:
    """Look at one process; None if it has no torch, is known, has gone or may not be seen."""
    try:
        start = proc.start_ticks(pid)
        if (pid, start) in known or pid == os.getpid():
            return None
        cmdline = tuple(proc.words(pid, "cmdline"))
        if not _PYTHON.search(proc.link(pid, "exe")) and not any(_PYTHON.search(word) for word in cmdline[:1]):
            return None
        if not has_torch(proc.maps(pid)):
            return None
        status = proc.status(pid)
        why = _why_skipped(status, cmdline)
        is_attached = not why and find_page(pid) is not None
    except (HookdError, OSError):
        return None
    return Candidate(
        pid, start, cmdline, status.uid, "attached" if is_attached else "skipped" if why else "attachable", why
    )


def has_torch(maps: list[proc.Mapping]) -> bool:
    """Say whether torch's library is mapped. Cheaper than to look inside, and harmless."""
    return any(_LIBTORCH.search(m.path) for m in maps)


def is_disabled(pid: int) -> bool:
    """Say whether the process was started with HOOKD_DISABLE=1."""
    return proc.environ(pid).get("HOOKD_DISABLE", "") not in ("", "0")


def _pids() -> Iterator[int]:
    for entry in sorted(Path("/proc").iterdir(), key=lambda path: path.name.zfill(10)):
        if entry.name.isdigit():
            yield int(entry.name)


def _why_skipped(status: proc.Status, cmdline: tuple[str, ...]) -> str:
    if status.state in "ZX":
        return "it has ended"
    if _WORKER.match(status.name):
        return "a data loader's worker"
    text = "\0".join(cmdline)
    for mark, what in _NO_TRAINERS:
        if mark in text:
            return what
    if any(_LAUNCHERS.search(word) for word in cmdline[:3]):
        return "a launcher of training processes"
    return "HOOKD_DISABLE is set" if is_disabled(status.pid) else ""
