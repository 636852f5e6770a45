"""Check from outside what an attach requires of an interpreter.

The Python versions that hookd was tested with are known to meet the requirements. On a newer version an attach continues if all
checks pass. Otherwise it is refused with the name of the first check that fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hookd.errors import TargetUnsupported
from hookd.tool.inject import debug_table
from hookd.wire.tested_versions import NEWEST_PYTHON, version_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookd.tool.inject.debug_table import Table
    from hookd.tool.inject.interpreter import Interpreter
    from hookd.tool.linux.memory import Memory


class Check(NamedTuple):
    """The result of checking one requirement.

    Attributes:
        name: of the requirement.
        holds: whether the requirement is met.
        found: what was observed.
    """

    name: str
    holds: bool
    found: str


def checks(memory: Memory, python: Interpreter) -> Iterator[Check]:
    """Yield the result of each check, in order of dependency; checks that cannot be made fail or are left out.

    Raises:
        OSError: the memory cannot be read.
    """
    # Always true: `interpreter.find` raises if a symbol is missing.
    yield Check("symbols", True, f"{len(python.symbols)} of CPython and libc")
    if python.version < debug_table.FIRST:  # older versions are entered by a stop only
        return
    table = debug_table.read(memory, python)
    yield Check("debug table", table is not None, "found" if table else "there is none")
    if table is not None:
        yield from _of_table(memory, python, table)


def _of_table(memory: Memory, python: Interpreter, table: Table) -> Iterator[Check]:
    yield Check("debug table version", table.version == python.version, version_text(table.version))
    yield Check("release", table.is_final, "final" if table.is_final else "a pre-release")
    has_size = table.own_size == table.size
    expected = "" if has_size else f", {table.size} in {version_text(table.layout)}"
    yield Check("debug table size", has_size, f"{table.own_size} bytes{expected}")
    misplaced = table.misplaced()
    yield Check("debug table offsets", not misplaced, f"{misplaced} lies outside" if misplaced else "all inside")
    if has_size and not misplaced:
        _, thread = debug_table.main_thread(memory, table)
        yield Check("main thread", bool(thread), "found" if thread else "not where the table says")


def require(memory: Memory, python: Interpreter, *, is_forced: bool) -> None:
    """Raise if the Python version is newer than those hookd was tested with and a check fails.

    Args:
        memory: of the process.
        python: its interpreter.
        is_forced: whether the attach enters by a stop, which needs only the symbols.

    Raises:
        TargetUnsupported: reason "python-version".
        OSError: the memory cannot be read.
    """
    if python.is_tested or is_forced:
        return
    for check in checks(memory, python):
        if not check.holds:
            word = f"Python {version_text(python.version)}, newer than any that hookd was tried on ({version_text(NEWEST_PYTHON)})"
            raise TargetUnsupported(
                f"process {memory.pid} runs {word}, and one check fails there: {check.name}: {check.found}",
                reason="python-version",
                hint="A newer hookd may know it. --force enters with a stop by ptrace, which does not need this.",
            )
