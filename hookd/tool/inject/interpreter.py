"""Find the Python interpreter in a process: its version and the few functions that an attach calls.

This reads the target's memory while the target runs; it stops nothing and writes nothing.
"""

from __future__ import annotations

import platform
import re
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hookd.errors import TargetUnsupported
from hookd.tool.inject import elf
from hookd.tool.linux.proc import link
from hookd.wire.tested_versions import NEWEST_PYTHON, OLDEST_PYTHON, version_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hookd.tool.linux.memory import Memory
    from hookd.tool.linux.proc import Mapping

QUEUE, EVALUATE, INITIALIZED = "Py_AddPendingCall", "PyRun_SimpleString", "Py_IsInitialized"
GIL_CHECK, GIL_TAKE, GIL_GIVE = "PyGILState_Check", "PyGILState_Ensure", "PyGILState_Release"
RUNTIME = "_PyRuntime"
DEBUG_COOKIE = b"xdebugpy"
"""The first bytes of the runtime of 3.13 and newer, see `remote_debug.py`."""
_NEEDED = (QUEUE, EVALUATE, INITIALIZED, GIL_CHECK, GIL_TAKE, GIL_GIVE)
_OPTIONAL = ("Py_Version", RUNTIME)
_MEMORY = ("mmap", "munmap")
_SEARCH_S = 10.0
"""Timeout of the search through images. Normally the right one is among the first; a hostile target may have any number."""
_MOST_CODE, _PORTION = 64 << 20, 1 << 20  # bytes of an image's code that are searched, in all and at a time
# x86_64: `mov $15, %rax; syscall`, which glibc and musl register as the return address of every signal handler; and
# `syscall; ret`, which they use for system calls that cannot fail.
_SIGRETURN = bytes.fromhex("48c7c00f000000 0f05")
_SYSCALL_RET = bytes.fromhex("0f05 c3")


@dataclass(frozen=True)
class Interpreter:
    """A Python interpreter in a process.

    Attributes:
        version: major and minor; (0, 0) if unknown.
        image: path of the program or library that contains it, as the target reports it.
        symbols: addresses, by name, of its functions and of libc's mmap and munmap.
        returns: see `Libc`.
    """

    version: tuple[int, int]
    image: str
    symbols: dict[str, int]
    returns: tuple[int, int]

    @property
    def is_tested(self) -> bool:
        """Whether hookd was tested with this version; a newer one must pass `foundation.require`."""
        return self.version <= NEWEST_PYTHON


def find(memory: Memory, maps: Sequence[Mapping]) -> Interpreter:
    """Find Python in the images that a process maps.

    Raises:
        TargetUnsupported: reasons "32-bit", "architecture", "not-python", "python-version", "free-threaded".
        OSError: the memory cannot be read.
    """
    pid, images = memory.pid, _images(maps)
    exe = link(pid, "exe")
    _require_machine(memory, [m for m in images if m.path == exe][:1])
    image, symbols = _search(memory, images, _NEEDED, lambda path: _python_rank(path, exe))
    if image is None:
        raise TargetUnsupported(
            f"process {pid} ({exe or 'no program'}) is not a Python process", reason="not-python",
            hint="`hookd ps` lists training processes.",
        )  # fmt: skip
    symbols.update(elf.Image(memory, image.start).find(_OPTIONAL))
    version = _version(memory, symbols, [image.path, exe, *(m.path for m in maps)])
    if version < OLDEST_PYTHON:
        word = version_text(version) if version != (0, 0) else "an unknown version"
        raise TargetUnsupported(
            f"process {pid} runs Python {word}; hookd supports {version_text(OLDEST_PYTHON)} and newer",
            reason="python-version",
            hint="The training needs a newer Python.",
        )
    if _is_free_threaded(memory, version, symbols):
        raise TargetUnsupported(
            f"process {pid} runs a free-threaded build of Python", reason="free-threaded",
            hint="hookd counts under the interpreter's lock; use the ordinary build of the same version.",
        )  # fmt: skip
    libc = find_libc(memory, maps)
    return Interpreter(version, image.path, symbols | libc.symbols, libc.returns)


@dataclass(frozen=True)
class Libc:
    """The C library of a process.

    Attributes:
        symbols: addresses of `mmap` and `munmap`.
        returns: addresses of the code that ends signal handlers, and of a system call followed by a return. `x86_64.py` uses
            both as return addresses of its calls; 0 if not found.
    """

    symbols: dict[str, int]
    returns: tuple[int, int]


def find_libc(memory: Memory, maps: Sequence[Mapping]) -> Libc:
    """Find the C library in the images that a process maps.

    Raises:
        TargetUnsupported: reason "libc".
    """
    image, symbols = _search(memory, _images(maps), _MEMORY, _libc_rank)
    if image is None:
        raise _no_libc(memory.pid)
    return Libc(symbols, (_code(memory, image.path, maps, _SIGRETURN), _code(memory, image.path, maps, _SYSCALL_RET)))


def find_variable(memory: Memory, maps: Sequence[Mapping], name: str) -> int:
    """Return the address of a variable of the C library.

    The variable is in the program if that has a copy relocation of it, else in the library.

    Raises:
        TargetUnsupported: reason "libc", no image defines it.
    """
    exe = link(memory.pid, "exe")
    image, symbols = _search(memory, _images(maps), (name,), lambda path: -1 if path == exe else _libc_rank(path))
    if image is None:
        raise _no_libc(memory.pid)
    return symbols[name]


def _no_libc(pid: int) -> TargetUnsupported:
    hint = "It may be linked statically: start it with `hookd run -- ...`."
    return TargetUnsupported(f"process {pid} has no C library that hookd knows", reason="libc", hint=hint)


def _images(maps: Sequence[Mapping]) -> list[Mapping]:
    return [m for m in maps if m.offset == 0 and "r" in m.access and m.path.startswith("/") and not _is_device(m.path)]


def _is_device(path: str) -> bool:
    """Whether a mapping may be device registers, whose values a read may change."""
    return re.match(r"/dev/(?!shm/)", path) is not None


def _require_machine(memory: Memory, program: Sequence[Mapping]) -> None:
    ours = platform.machine()
    for mapping in program:
        try:
            header = elf.header(memory, mapping.start)
        except elf.NotElfError:
            continue
        if header.bits == 32:
            hint = "hookd supports 64-bit programs only."
            raise TargetUnsupported(f"process {memory.pid} is a 32-bit program", reason="32-bit", hint=hint)
        if ours not in elf.MACHINES or header.machine != elf.MACHINES[ours]:
            raise TargetUnsupported(
                f"process {memory.pid} is built for another machine than {ours}",
                reason="architecture",
                hint="Run hookd on a machine of its architecture.",
            )


def _search(
    memory: Memory,
    images: Sequence[Mapping],
    names: Sequence[str],
    rank: Callable[[str], int],
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Mapping | None, dict[str, int]]:
    """Return the first image, in order of `rank`, that defines all of `names`, and their addresses.

    Raises:
        AttachError: reason "unreadable", an image cannot be read in time. The search ends then: the blocked reader holds a lock
            that the process needs.
    """
    until = clock() + _SEARCH_S
    for image in sorted(images, key=lambda m: rank(m.path)):
        if clock() > until:
            break
        try:
            symbols = elf.Image(memory, image.start).find(names)
        except (elf.NotElfError, OSError, struct.error):
            continue
        if len(symbols) == len(names):
            return image, symbols
    return None, {}


def _python_rank(path: str, exe: str) -> int:
    name = path.rpartition("/")[2]
    return 0 if "libpython" in name else 1 if path == exe else 2 if "python" in name else 3


def _libc_rank(path: str) -> int:
    name = path.rpartition("/")[2]
    return 0 if re.match(r"libc[.-]|ld-musl|libc\.musl", name) else 1


def _version(memory: Memory, symbols: dict[str, int], paths: Sequence[str]) -> tuple[int, int]:
    """Return the version: 3.11 and newer export it; for older ones the names of loaded files show it."""
    if "Py_Version" in symbols:
        (number,) = struct.unpack("<Q", memory.read(symbols["Py_Version"], 8))
        return (number >> 24) & 0xFF, (number >> 16) & 0xFF
    for path in paths:
        match = re.search(r"(?:python|\.cpython-)(\d)\.?(\d+)", path.rpartition("/")[2])
        if match:
            return int(match[1]), int(match[2])
    return 0, 0


def _is_free_threaded(memory: Memory, version: tuple[int, int], symbols: dict[str, int]) -> bool:
    """Whether the build is free-threaded, by the third word of _Py_DebugOffsets (Include/internal/pycore_debug_offsets.h)."""
    if version < (3, 13) or RUNTIME not in symbols:
        return False
    cookie, _, flag = struct.unpack("<8sQQ", memory.read(symbols[RUNTIME], 24))
    return bool(cookie == DEBUG_COOKIE and flag)


def _code(memory: Memory, path: str, maps: Sequence[Mapping], code: bytes) -> int:
    for mapping in maps:
        if mapping.path != path or "x" not in mapping.access or "r" not in mapping.access:
            continue
        address = _find(memory, mapping.start, min(mapping.end, mapping.start + _MOST_CODE), code)
        if address is not None:
            return address
    return 0


def _find(memory: Memory, start: int, end: int, code: bytes) -> int | None:
    """Search memory in portions: a mapping may be larger than our own memory."""
    for at in range(start, end, _PORTION):
        offset = memory.read(at, min(_PORTION + len(code) - 1, end - at)).find(code)
        if offset >= 0:
            return at + offset
    return None
