"""A target whose C library refuses one call of hookd's, as the kernel does at a limit or behind a filter."""

from __future__ import annotations

import mmap
import struct
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.support.environment import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from typing_extensions import Self

SOURCE = REPOSITORY / "tests" / "support" / "refusing.c"
_CONTROL = struct.Struct("iii20s200s")


class Refusals:
    """The environment of a target, and control over which of its C library calls fails.

    Args:
        directory: for the shared object, and for the file that controls it.

    Attributes:
        environment: the variables that the target needs.
    """

    def __init__(self, directory: Path) -> None:
        library, reported = directory / "refusing.so", directory / "refusals"
        try:
            command = ["gcc", "-O1", "-shared", "-fPIC", "-w", "-o", library, SOURCE, "-ldl"]
            subprocess.run(command, check=True, capture_output=True, timeout=100)
        except FileNotFoundError:
            pytest.skip("there is no C compiler")
        reported.write_bytes(bytes(_CONTROL.size))
        with reported.open("r+b") as file:
            self._control = mmap.mmap(file.fileno(), _CONTROL.size)
        self.environment = {"LD_PRELOAD": str(library), "REFUSALS": str(reported)}

    def refuse(self, nth: int, error: int, names: Collection[str] = ()) -> None:
        """Make the nth call from now on fail with this errno, of all calls or of those with some names; 0: none."""
        chosen = "".join(f" {name} " for name in names).encode()
        self._control[:] = _CONTROL.pack(0, error, 0, b"", chosen)  # nothing is counted until all is written
        self._control[:4] = nth.to_bytes(4, "little")

    def refused(self) -> str:
        """Return the name of the call that was refused, or "" if there were not that many."""
        name: bytes = _CONTROL.unpack(self._control[:])[3]
        return name.rstrip(b"\0").decode()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._control.close()
