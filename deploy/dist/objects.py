"""Check that the shared objects of a wheel load wherever its platform tags say: with each glibc from 2.17 on, and with musl."""

from __future__ import annotations

import io
import re
import zipfile
from typing import TYPE_CHECKING

from elftools.elf.elffile import ELFFile

if TYPE_CHECKING:
    from pathlib import Path

    from elftools.elf.dynamic import DynamicSection

ELF_MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}
OF_EVERY_LIBC = {"clock_gettime", "dlclose", "memcpy", "memset"}
"""What the shared objects may take from the C library of the process: functions of POSIX and ISO C."""


def check(wheel: Path, machine: str) -> None:
    """Check each shared object of a wheel.

    Raises:
        ValueError: the wheel has none, or one is for another machine, is linked to a library, needs a version of a symbol, or takes a
            symbol that neither Python nor every C library has.
    """
    with zipfile.ZipFile(wheel) as archive:
        images = {name: archive.read(name) for name in archive.namelist() if name.endswith(".so")}
    if not images:
        raise ValueError(f"{wheel.name} has no shared object")
    for name, image in images.items():
        found = problems(image, machine)
        if found:
            raise ValueError(f"{wheel.name}: {name} {'; '.join(found)}")


def problems(image: bytes, machine: str) -> list[str]:
    """Return what keeps a shared object from loading everywhere, as phrases of which it is the subject."""
    elf = ELFFile(io.BytesIO(image))
    dynamic: DynamicSection = elf.get_section_by_name(".dynamic")
    found = []
    if elf["e_machine"] != ELF_MACHINES[machine]:
        found.append(f"is for {elf['e_machine']}")
    libraries = [tag.needed for tag in dynamic.iter_tags("DT_NEEDED")]
    if libraries:
        found.append(f"is linked to {', '.join(libraries)}")
    if any(dynamic.iter_tags("DT_VERNEED")):
        found.append("needs versions of symbols")
    foreign = {name for name in _undefined(elf) if not re.match("_?Py", name)} - OF_EVERY_LIBC
    if foreign:
        found.append(f"takes {', '.join(sorted(foreign))}")
    return found


def _undefined(elf: ELFFile) -> set[str]:
    symbols = elf.get_section_by_name(".dynsym").iter_symbols()
    return {symbol.name for symbol in symbols if symbol["st_shndx"] == "SHN_UNDEF" and symbol.name}
