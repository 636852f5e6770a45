"""Find agents by their pages, and processes that could be attached to."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import platform
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hookd.errors import HookdError, NoSuchTarget, PageError
from hookd.tool.attach import environment
from hookd.tool.linux import bounded, commandline, permission, proc
from hookd.tool.linux.accounts import account_of
from hookd.wire import page

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hookd.wire.identity import Identity

PAGE_LINK = f"/memfd:{page.NAME}"
_PYTHON = re.compile(r"python|pypy", re.IGNORECASE)
_LIBTORCH = re.compile(r"libtorch[^/]*\.so|/torch/_C\.", re.ASCII)
_EMBEDDED = re.compile(rb"/libpython3[^/\n]*\.so|/libtorch_python\.so")
_LIBTORCH_IN_MAPS = re.compile(rb"libtorch[^/\n]*\.so|/torch/_C\.")
_FORK_SERVER = "multiprocessing.forkserver"
SILENT = "its memory does not answer"
"""Why a process with a locked address space is skipped: a reader of its memory is blocked, see `waiter.py`."""
NO_TORCH = "it has not loaded torch"
"""Why a process is skipped that may still begin to train."""
LAUNCHER = "a launcher of training processes"
"""Why a parent of ranks is skipped: `hookd attach --tree` accepts its pid."""
_WORKER = re.compile(r"pt_data_worker|pt_data_pin")
# System calls in which a process may wait for its children forever, and the argument that means forever: (index, value).
# Numbers: arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h (Linux 6.18).
_FOREVER = 0xFFFFFFFF
_WAITS: dict[str, dict[int, tuple[int, int] | None]] = {
    "x86_64": {61: None, 247: None, 7: (2, _FOREVER), 232: (3, _FOREVER), 281: (3, _FOREVER), 271: (2, 0), 270: (4, 0)},
    "aarch64": {260: None, 95: None, 22: (3, _FOREVER), 73: (2, 0), 72: (4, 0)},
}


@dataclass(frozen=True)
class Candidate:
    """A Python process.

    Attributes:
        has_torch: whether torch's library is mapped.
        has_page: whether an agent's page is mapped, which may be inherited by a fork.
        start: start time in clock ticks after boot; with the pid it identifies the process forever. 0 if it cannot be read.
        state: "attached" (it has a hookd agent), "attachable", or "skipped" (`why` is the reason).
    """

    pid: int
    start: int
    cmdline: tuple[str, ...]
    uid: int
    state: Literal["attached", "attachable", "skipped"]
    why: str = ""
    has_torch: bool = True
    has_page: bool = False


_POLL_S = 0.005
_MOST_PAGES = 64
"""Limit on the pages of a process that are checked: its own page, and those inherited by forks."""
_MOST_CHILDREN = 64
"""Limit on the children of a process that are checked, to find out whether it only waits for them."""
_MAX_COMMAND = 1 << 16
"""Bytes of a command line that are read here; less than usual, because many processes are inspected together."""


def find_page(pid: int) -> int | None:
    """Open the page of the agent in process `pid` for reading; None without an agent.

    The caller closes the descriptor. Pages that the process has inherited by a fork are skipped. Pages of any protocol version
    are found.

    Raises:
        NoSuchTarget: there is no such process.
        PermissionError: its descriptors cannot be seen.
    """
    # An agent maps its page: this takes one read, however many descriptors the process has.
    if PAGE_LINK.encode() not in proc.read(pid, "maps"):
        return None
    for number in numbers_of_pages(pid):
        if (fd := _own_page(pid, number)) is not None:
            return fd
    return None


def numbers_of_pages(pid: int) -> list[int]:
    """Return the first descriptors of a process with the name of a page, without checking that they are pages.

    Raises:
        NoSuchTarget: there is no such process.
        PermissionError: its descriptors cannot be seen.
        AttachError: reason "unreadable", they were not read in time.
    """
    try:
        numbers = os.listdir(f"/proc/{pid}/fd")  # noqa: PTH208  names only, in one call
    except (FileNotFoundError, ProcessLookupError) as exc:
        raise proc.missing(pid, "fd", exc) from exc
    names = bounded.links(account_of(pid), [f"{pid}/fd/{number}" for number in numbers])
    named = (int(number) for number, name in zip(numbers, names, strict=True) if name.startswith(PAGE_LINK))
    return list(itertools.islice(named, _MOST_PAGES))


def _own_page(pid: int, number: int) -> int | None:
    """Open a descriptor with the name of a page; None if it is not the process's own page.

    Raises:
        OSError: we have no descriptors left.
    """
    try:
        # Root owns the page of a process that has dropped its privileges since.
        fd = bounded.open_memory_file(pid, number, frozenset({proc.status(pid).uid, 0}))
    except OSError as exc:
        if exc.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return None
    try:
        if _is_own(pid, fd):
            return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def open_page(pid: int) -> page.PageReader:
    """Open the page of the agent in process `pid`; the caller closes it.

    Raises:
        NoSuchTarget: there is no such process, or, with reason "not-attached", no agent in it.
        PermissionDenied: its descriptors cannot be seen.
        PageError: the page is not valid.
    """
    try:
        fd = find_page(pid)
    except PermissionError as exc:
        raise permission.explain(pid, exc) from exc
    if fd is None:
        raise NoSuchTarget(f"no agent in process {pid}", reason="not-attached", hint=f"Run `hookd attach {pid}`.")
    return page.PageReader(fd)


def identity(pid: int) -> Identity | None:
    """Read the identity in the page of the agent in process `pid`; None without an agent."""
    fd = find_page(pid)
    if fd is None:
        return None
    reader = page.PageReader(fd, any_protocol=True)
    try:
        return reader.identity()
    finally:
        reader.close()


def settled(pid: int, timeout_s: float) -> Identity | None:
    """Wait until an agent is neither starting nor leaving; return its identity, None without an agent.

    After `timeout_s` its current identity is returned. An agent may leave late because a call that began under it still runs.

    Raises:
        NoSuchTarget: the process ended.
    """
    return _wait(pid, timeout_s, lambda state: state not in ("running", "exited"))


def wait_left(pid: int, timeout_s: float) -> bool:
    """Wait until an agent that is leaving process `pid` is gone.

    It releases its page last.

    Returns:
        False if an agent stays: it is not leaving, or has not left in time (a call that began under it still runs).

    Raises:
        NoSuchTarget: the process ended.
    """
    return _wait(pid, timeout_s, lambda state: state in ("detaching", "detached")) is None


def _wait(pid: int, timeout_s: float, is_passing: Callable[[str], bool]) -> Identity | None:
    """Wait while an agent is in a transient state; return its identity after that, None without an agent."""
    deadline = time.monotonic() + timeout_s
    while (fd := find_page(pid)) is not None:
        reader = page.PageReader(fd, any_protocol=True)
        try:
            if not is_passing(reader.state()) or time.monotonic() > deadline:
                return reader.identity()
        finally:
            reader.close()
        time.sleep(_POLL_S)
    return None


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
    """Return what a process may read as its own start: by its time namespace's clock, or 0 without /proc."""
    return proc.start_ticks(pid) + proc.boot_shift_ticks(pid), 0


def candidates() -> list[Candidate]:
    """Return the processes that have torch loaded, in order of pid."""
    return [candidate for pid in _pids() if (candidate := inspect(pid)) is not None and candidate.has_torch]


def inspect(pid: int) -> Candidate | None:
    """Inspect one process; None if it does not run Python, is this process, is gone or is hidden."""
    try:
        return examine(pid)
    except (HookdError, OSError):
        return None


def examine(pid: int) -> Candidate | None:
    """Inspect one process; None if it does not run Python, or is this process.

    Raises:
        HookdError, OSError: it is gone or hidden, or something of it could not be read at the moment.
    """
    status, start = proc.status(pid), 0
    try:
        start = proc.start_ticks(pid)
        return None if pid == os.getpid() else _inspected(start, status)
    except HookdError as exc:
        if exc.reason == "unreadable":
            return Candidate(pid, start, (), status.uid, "skipped", SILENT, has_torch=False)
        raise


def _inspected(start: int, status: proc.Status) -> Candidate | None:
    pid = status.pid
    cmdline, maps = tuple(proc.words(pid, "cmdline", _MAX_COMMAND)), proc.read(pid, "maps")
    if not is_python(pid, cmdline, maps) or not is_in_scope(pid):
        return None
    has_torch, has_page = _LIBTORCH_IN_MAPS.search(maps) is not None, PAGE_LINK.encode() in maps
    why = _why_skipped(status, cmdline) or ("" if has_torch else NO_TORCH)
    is_attached = has_page and holds_page(pid)
    state: Literal["attached", "attachable", "skipped"] = (
        "attached" if is_attached else "skipped" if why else "attachable"
    )
    return Candidate(pid, start, cmdline, status.uid, state, why, has_torch, has_page)


def is_python(pid: int, cmdline: Sequence[str], maps: bytes) -> bool:
    """Whether a process runs Python.

    The name of its program is checked because the command line may be rewritten (`ray::…`). The mapped libraries are checked
    because the interpreter may have another name, or be embedded in a C++ program.
    """
    named = (proc.link(pid, "exe"), *cmdline[:1])
    return any(_PYTHON.search(word) for word in named) or _EMBEDDED.search(maps) is not None


def age_s(start: int) -> float:
    """Return the age of a process in seconds, from its start time in clock ticks."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start / os.sysconf("SC_CLK_TCK")


def holds_page(pid: int) -> bool:
    """Whether the process has an agent of its own."""
    fd = find_page(pid)
    if fd is not None:
        os.close(fd)
    return fd is not None


def has_torch(maps: list[proc.Mapping]) -> bool:
    """Whether torch's library is mapped. Cheaper than checking inside the process, and harmless."""
    return any(_LIBTORCH.search(m.path) for m in maps)


def is_in_scope(pid: int) -> bool:
    """Whether a process's environment matches HOOKD_SCOPE, NAME=VALUE or NAME, of this tool; True if that is unset."""
    name, equals, value = os.environ.get("HOOKD_SCOPE", "").partition("=")
    if not name:
        return True
    current = (environment.of(pid) or {}).get(name)
    return current == value if equals else current is not None


def is_disabled(pid: int) -> bool:
    """Whether HOOKD_DISABLE is set in the process, as far as visible.

    The injected code checks again in the process.
    """
    return (environment.of(pid) or {}).get("HOOKD_DISABLE", "") not in ("", "0")


def _pids() -> Iterator[int]:
    for entry in sorted(Path("/proc").iterdir(), key=lambda path: path.name.zfill(10)):
        if entry.name.isdigit():
            yield int(entry.name)


def _why_skipped(status: proc.Status, cmdline: tuple[str, ...]) -> str:
    """Return why a process does not train, as far as visible from outside, else ""."""
    if status.state in "ZX":
        return "it has ended"
    if is_disabled(status.pid):
        return "HOOKD_DISABLE is set"
    if _WORKER.match(status.name):
        return "a data loader's worker"
    if kind := commandline.helper(cmdline):
        return kind
    text = "\0".join(cmdline)
    # The children of a fork server have its command line as well.
    if _FORK_SERVER in text and _FORK_SERVER not in "\0".join(_cmdline(status.ppid)):
        return "multiprocessing's fork server"
    if commandline.is_launcher(cmdline) or _waits_for_ranks(status.pid):
        return LAUNCHER
    return ""


def _waits_for_ranks(pid: int) -> bool:
    """Whether the main thread only waits for its children, and one of these may be training.

    The parents of torch.multiprocessing.spawn and of a plain `subprocess.run` do so. A training process with data loader workers
    waits for them with a timeout.
    """
    try:
        if not _waits_for_ever(proc.read(pid, "syscall").split()):
            return False
        return any(map(_may_train, itertools.islice(_started_by(pid), 2 * _MOST_CHILDREN)))
    except (HookdError, OSError, ValueError):  # not allowed, or a kernel without them
        return False


def _started_by(pid: int) -> Iterator[int]:
    """Yield the first children of the main thread, and those that its fork server has started for it."""
    children = _children(pid)
    yield from children
    for child in children:
        if _FORK_SERVER in "\0".join(_cmdline(child)):
            with contextlib.suppress(HookdError, OSError):
                yield from _children(child)


def _children(pid: int) -> list[int]:
    return [int(word) for word in proc.read(pid, f"task/{pid}/children").split()[:_MOST_CHILDREN]]


def _waits_for_ever(call: list[bytes]) -> bool:
    waits = _WAITS.get(platform.machine(), {})
    if not call or not call[0].isdigit() or int(call[0]) not in waits:
        return False
    condition = waits[int(call[0])]
    return condition is None or int(call[1 + condition[0]], 16) & _FOREVER == condition[1]


def _may_train(pid: int) -> bool:
    try:
        status, cmdline = proc.status(pid), _cmdline(pid)
        maps = proc.read(pid, "maps")
        if not is_python(pid, cmdline, maps):  # a shell, `env`, `numactl` before the program
            return False
        is_helper = _WORKER.match(status.name) or commandline.helper(cmdline)
        return not is_helper and _LIBTORCH_IN_MAPS.search(maps) is not None
    except (HookdError, OSError):
        return False


def _cmdline(pid: int) -> list[str]:
    try:
        return proc.words(pid, "cmdline", _MAX_COMMAND)
    except (HookdError, OSError):
        return []
