"""What an attach stands on in an interpreter, each part checked from outside. Tool side.

On a version that hookd was tried on these parts are known to be there. On a newer one an attach goes on if all checks
hold, and is refused with the name of the first that does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hookd.errors import TargetUnsupported
from hookd.tool.inject import debug_table
from hookd.wire.proven import NEWEST_PYTHON, version_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookd.tool.inject.debug_table import Table
    from hookd.tool.inject.interpreter import Interpreter
    from hookd.tool.linux.memory import Memory


class Check(NamedTuple):
    """One part of the foundation.

    Attributes:
        name: of what was looked at.
        holds: whether it is as hookd needs it.
        found: what was seen.
    """

    name: str
    holds: bool
    found: str


def checks(memory: Memory, python: Interpreter) -> Iterator[Check]:
    """Look at all parts, the ones that others depend on first; what cannot be looked at does not hold.

    Raises:
        OSError: the memory cannot be read.
    """
    yield Check("symbols", True, f"{len(python.symbols)} of CPython and libc")  # without them it was no interpreter
    if python.version < debug_table.FIRST:  # where a stop is the only way in
        return
    table = debug_table.read(memory, python)
    yield Check("debug table", table is not None, "found" if table else "there is none")
    if table is not None:
        yield from _of_table(memory, python, table)


def _of_table(memory: Memory, python: Interpreter, table: Table) -> Iterator[Check]:
    yield Check("debug table version", table.version == python.version, version_text(table.version))
    yield Check("release", table.is_final, "final" if table.is_final else "a pre-release")
    has_size = table.own_size == table.size
    wanted = "" if has_size else f", {table.size} in {version_text(table.layout)}"
    yield Check("debug table size", has_size, f"{table.own_size} bytes{wanted}")
    misplaced = table.misplaced()
    yield Check("debug table offsets", not misplaced, f"{misplaced} lies outside" if misplaced else "all inside")
    if has_size and not misplaced:
        _, thread = debug_table.main_thread(memory, table)
        yield Check("main thread", bool(thread), "found" if thread else "not where the table says")


def require(memory: Memory, python: Interpreter, *, is_forced: bool) -> None:
    """Refuse a version that is newer than any that hookd was tried on where a check fails.

    Args:
        memory: of the process.
        python: what runs there.
        is_forced: whether to enter with a stop, which needs the symbols alone.

    Raises:
        TargetUnsupported: reason "python-version".
        OSError: the memory cannot be read.
    """
    if python.is_proven or is_forced:
        return
    for check in checks(memory, python):
        if not check.holds:
            word = f"Python {version_text(python.version)}, newer than any that hookd was tried on ({version_text(NEWEST_PYTHON)})"
            raise TargetUnsupported(
                f"process {memory.pid} runs {word}, and one check fails there: {check.name}: {check.found}",
                reason="python-version",
                hint="A newer hookd may know it. --force enters with a stop by ptrace, which does not need this.",
            )
