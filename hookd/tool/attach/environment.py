"""Read the environment of a process: the initial one, or the current one if that is overwritten.

A program that sets a title for `ps` (setproctitle, as in the workers of Ray and vLLM) writes the title over its arguments and the
environment behind them, so that /proc/PID/environ shows only the rest. Before that it copies the environment to another address, to
which `environ` of its C library points.
"""

from __future__ import annotations

import functools
import os
import struct
from typing import TYPE_CHECKING

from hookd.errors import HookdError, NoSuchTarget
from hookd.tool.inject import elf, interpreter
from hookd.tool.linux import proc
from hookd.tool.linux.memory import Opened

if TYPE_CHECKING:
    from collections.abc import Iterator

_MOST, _LONGEST = 4096, 1 << 17
"""Limits on the number of variables that are read from memory, and on the bytes of one: MAX_ARG_STRLEN of
include/uapi/linux/binfmts.h."""
_ADDRESS = struct.Struct("<Q")


def of(pid: int) -> dict[str, str] | None:
    """Return the environment of a process, None if it is overwritten and not found in memory.

    Raises:
        NoSuchTarget: the process does not exist (any more).
        PermissionError: the kernel denies access.
        AttachError: reason "unreadable", its address space is locked.
    """
    block = proc.read(pid, "environ", proc.MAX_WORDS)
    if is_whole(block):
        return _parsed(block.split(b"\0"))
    try:
        return dict(_moved(pid, proc.program(pid)))
    except NoSuchTarget:
        raise
    except (HookdError, OSError, ValueError, LookupError, struct.error):
        return None


def is_whole(block: bytes) -> bool:
    """Whether a block of /proc/PID/environ is unmodified.

    A title leaves NULs in it, or a word without a terminator.
    """
    words = block[:-1].split(b"\0")
    return (block.endswith(b"\0") and all(b"=" in word[1:] for word in words)) or len(block) == proc.MAX_WORDS


@functools.lru_cache(maxsize=256)
def _moved(pid: int, program: str) -> dict[str, str]:
    """Read the environment of a program from its memory.

    Cached, because every inspection of the process asks for it.

    Raises:
        HookdError: the program has ended, does not answer, or has an unknown C library.
        OSError: its memory cannot be read.
    """
    with Opened(pid, program) as memory:
        place = interpreter.find_variable(memory, memory.mappings(), "environ")
        return _parsed(_strings(elf.Pages(memory), place))


def _strings(pages: elf.Pages, place: int) -> Iterator[bytes]:
    """Yield the strings of a `char **` variable at the address `place`."""
    (array,) = _ADDRESS.unpack(pages.read(place, 8))
    left = proc.MAX_WORDS
    for index in range(_MOST if array else 0):
        (address,) = _ADDRESS.unpack(pages.read(array + 8 * index, 8))
        if not address or left <= 0:
            return
        text = pages.string(address, min(left, _LONGEST))
        left -= len(text) + 1
        yield text


def _parsed(words: Iterator[bytes] | list[bytes]) -> dict[str, str]:
    pairs = (os.fsdecode(word).partition("=") for word in words)
    return {key: value for key, equals, value in pairs if equals}
