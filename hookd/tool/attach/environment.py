"""The environment of a process: as it was started with it, or where it has written over that, as it has it now. Tool side; reads only.

A program that shows a title in `ps` (setproctitle, as Ray's and vLLM's workers do) writes it over its words and over the
environment behind them; /proc/PID/environ shows what is left of that. The environment itself was copied to another place before,
to which `environ` of its C library points.
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
"""So many variables are read from memory, and so many bytes of one: MAX_ARG_STRLEN of include/uapi/linux/binfmts.h."""
_ADDRESS = struct.Struct("<Q")


def of(pid: int) -> dict[str, str] | None:
    """Return the environment of a process, None where it has written over it and its memory does not tell.

    Raises:
        NoSuchTarget: there is no such process (any more).
        PermissionError: the kernel does not show it to us.
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
    """Say whether a block of /proc/PID/environ is as the kernel made it: a title leaves zeros, or one word without an end."""
    words = block[:-1].split(b"\0")
    return (block.endswith(b"\0") and all(b"=" in word[1:] for word in words)) or len(block) == proc.MAX_WORDS


@functools.lru_cache(maxsize=256)
def _moved(pid: int, program: str) -> dict[str, str]:
    """Read the environment of a program out of its memory; once, for at each look at the process it is asked for.

    Raises:
        HookdError: it has ended, does not answer, or is none that we know.
        OSError: its memory cannot be read.
    """
    with Opened(pid, program) as memory:
        place = interpreter.find_variable(memory, memory.mappings(), "environ")
        return _parsed(_strings(elf.Pages(memory), place))


def _strings(pages: elf.Pages, place: int) -> Iterator[bytes]:
    """Yield the strings to which an array of addresses points, whose own address stands at `place`."""
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
