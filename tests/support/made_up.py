"""Interpreters that say they are of a version that there is not: a copy of a real one with other words in it.

They run like the real one, which reads neither the number nor the table that it shows to other processes.
"""

from __future__ import annotations

import dataclasses
import subprocess
from typing import TYPE_CHECKING

from hookd.tool.inject.interpreter import DEBUG_COOKIE
from tests.support import stub
from tests.support.environment import target_environment

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.interpreters import Interpreter
    from tests.support.processes import Process

NEWER = (3, 99)
_WHERE = """
import ctypes
at = ctypes.addressof(ctypes.c_ulong.in_dll(ctypes.pythonapi, "Py_Version"))
for line in open("/proc/self/maps"):
    area, _, offset, _, _, *path = line.split()
    start, end = (int(one, 16) for one in area.split("-"))
    if start <= at < end:
        print(at - start + int(offset, 16), *path)
"""
_TABLE_HEADER = 24
_FINALIZING = 8
"""Where the table has the offset of the field behind it, from the header on: the table's own size with it."""


def start(directory: Path, body: str, python: Interpreter, *, resized: int = 0) -> Process:
    """Start a target on an interpreter like `python` that claims NEWER as its version; see `stub.start`.

    Args:
        directory: a directory of its file system, as we see it.
        body: its code.
        python: the real interpreter.
        resized: by how many bytes its table claims to be larger than it is.
    """
    command = [*python.command, "-c", _WHERE]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=target_environment())
    place, path = output.stdout.split()
    source = python.root / path.lstrip("/")
    copy = directory / source.name
    copy.write_bytes(_changed(bytearray(source.read_bytes()), int(place), resized))
    copy.chmod(0o755)
    inside = python.inside(copy)
    if python.is_shared:
        return stub.start(directory, body, python, LD_PRELOAD=str(inside))
    return stub.start(directory, body, dataclasses.replace(python, path=str(inside)))


def _changed(data: bytearray, place: int, resized: int) -> bytearray:
    real = bytes(data[place : place + 8])
    newer = (NEWER[0] << 24 | NEWER[1] << 16 | 0xF0).to_bytes(8, "little")
    data[place : place + 8] = newer
    table = data.find(DEBUG_COOKIE + real)
    if table >= 0:
        data[table + 8 : table + 16] = newer
        field = table + _TABLE_HEADER + _FINALIZING
        data[field : field + 8] = (int.from_bytes(data[field : field + 8], "little") + resized).to_bytes(8, "little")
    return data
