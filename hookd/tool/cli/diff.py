"""`hookd diff A B`: tell where two runs part."""

from __future__ import annotations

import contextlib
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

import click

from hookd.errors import HookdError
from hookd.tool.cli import options, output

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

    from hookd.tool.fingerprints.comparison import Terms


class DifferentStep(TypedDict):
    """How different a step of two runs is."""

    step: int
    """Its number in A."""
    differing: int
    """Number of things that differ."""
    pairs: int
    """Number of things that both have."""
    relative: float
    """The largest relative difference of norms and extreme elements among them."""


class Parting(TypedDict):
    """Where two runs part."""

    code: int
    """0: equal, 1: different, 2: they cannot be compared; also the exit code."""
    sentence: str
    """The result in words."""
    step: int
    """The first step that differs; 0 if none does."""
    phase: str
    """`data`, `weights`, `forward`, `loss`, `backward`, `gradients`, `settings`, `state`, `update` or `buffers`, `random` if nothing
    else was compared; "" if unknown."""
    name: str
    """The module, parameter or setting that differs first; "" if there is none."""
    advice: str
    """What to do; "" for nothing."""
    notes: list[str]
    """What was assumed, and what could not be compared."""
    compared: int
    """Number of steps that both have."""
    growth: list[DifferentStep]
    """The steps with entries in both files, from the first different one on."""


class CannotCompareError(HookdError):
    """An error whose exit code does not say that the runs differ."""

    exit_code = 2


WAIT_S = 0.05
"""Interval at which a file is looked at that is still being written."""
FIRST, LAST = 5, 3
"""Steps that the table shows after the first difference, and at the end."""


@click.command(short_help="Compare two fingerprints: where do the runs part?")
@click.argument("a")
@click.argument("b")
@click.option("--tolerance", default="0", metavar="X|Nulp[:DTYPE]",
              help="Largest difference of norms and of extreme elements that counts as equal: relative, or in units in the last place "
              "of a dtype.  [default: 0, equal bits]")  # fmt: skip
@click.option(
    "--map", "maps", multiple=True, metavar="OLD=NEW", help="B calls the module OLD of A NEW; may be repeated."
)
@click.option("--what", metavar="PHASES", help="Compare these phases only, separated by commas: data, weights, forward, loss, "
              "backward, gradients, state, update, buffers, settings.  [default: all; of two ranks of a job what replicas have in common]")  # fmt: skip
@click.option("--steps", type=click.IntRange(min=1), default=10, show_default=True, metavar="N",
              help="Number of steps that are recorded of a process whose fingerprint the daemon does not keep.")  # fmt: skip
@options.host
@options.json
def diff(
    *, a: str, b: str, tolerance: str, maps: tuple[str, ...], what: str | None, steps: int, host: str | None, as_json: bool
) -> int:  # fmt: skip
    """Compare two fingerprints: files of `hookd fingerprint`, or processes.

    The exit code is 0 if they are equal, 1 if they differ, and 2 if they cannot be compared; for a process that cannot be recorded,
    that of `hookd fingerprint`.
    """
    from hookd.tool.fingerprints import comparison
    from hookd.tool.fingerprints.steps import COMPARED
    from hookd.tool.fingerprints.tolerance import Tolerance

    try:
        allowed = Tolerance.parse(tolerance)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--tolerance") from None
    if not all(one.count("=") == 1 and all(one.split("=")) for one in maps):
        raise click.BadParameter("write OLD=NEW", param_hint="--map")
    names = dict(one.split("=") for one in maps)
    phases = None if what is None else frozenset(map(str.strip, what.split(",")))
    if unknown := (phases or frozenset()) - set(COMPARED):
        raise click.BadParameter(
            f"{', '.join(sorted(map(repr, unknown)))}: choose from {', '.join(COMPARED)}", param_hint="--what"
        )
    try:
        with _files((a, b), steps, host) as (one, other):
            found = compared(one, other, comparison.Terms(allowed, names, phases))
    except HookdError as error:
        if error.exit_code != comparison.DIFFERENT:
            raise
        raise CannotCompareError(error.message, reason=error.reason, hint=error.hint) from error
    if as_json:
        output.emit(found)
    else:
        show(found)
    return found["code"]


@contextlib.contextmanager
def _files(words: tuple[str, str], steps: int, host: str | None) -> Iterator[list[Path]]:
    """Yield the files to compare. Those of processes that nobody records are recorded now, together, into files that are deleted."""
    from hookd.tool.cli.fingerprint import kept_of, undone_by_sigterm
    from hookd.tool.fingerprints import file
    from hookd.tool.fingerprints.live import record_together

    with undone_by_sigterm(), tempfile.TemporaryDirectory(prefix="hookd-diff-") as scratch:
        found: dict[str, Path] = {}
        for word in words:
            pid = None if Path(word).exists() else options.number(word)
            if pid is None and not Path(word).is_file():
                raise click.UsageError(f"'{word}' is neither a file nor a process id.")
            kept = None if pid is None else kept_of(pid, host)
            found[word] = Path(word) if pid is None else kept or Path(scratch, str(pid))
            if pid is None:
                file.digests(Path(word))  # before anything is recorded
        pids = {int(path.name): path for path in found.values() if path.parent == Path(scratch)}
        if pids:
            output.say(f"recording {steps} steps of {' and '.join(f'process {pid}' for pid in pids)}")
            for pid, one in zip(pids, record_together(pids, steps), strict=True):
                if one.is_ended or one.is_detached:
                    why = "it has ended" if one.is_ended else "hookd was detached from it"
                    output.say(f"of process {pid} only {one.steps} steps were recorded: {why}")
        yield [found[word] for word in words]


def wait(path: Path) -> None:
    """Wait until the writer of a file has ended, if the process has."""
    from hookd.tool.fingerprints import file
    from hookd.tool.linux import proc

    file.wait(path, lambda pid: not proc.has_ended(pid), lambda: time.sleep(WAIT_S))


def compared(a: Path, b: Path, terms: Terms | None = None) -> Parting:
    """Compare two files, once their writers have ended, if the processes have."""
    from hookd.tool.fingerprints import comparison, file

    for path in (a, b):
        wait(path)
    return cast("Parting", asdict(comparison.compare(file.read(a), file.read(b), terms or comparison.Terms())))


def show(found: Parting) -> None:
    """Print where two runs part."""
    for line in (found["sentence"], found["advice"], *found["notes"]):
        if line:
            output.show(line)
    if found["growth"]:
        output.show(_table(found["growth"]))


def _table(growth: list[DifferentStep]) -> Table:
    rows = growth if len(growth) <= FIRST + LAST else growth[:FIRST] + growth[-LAST:]
    cells = [
        (
            str(row["step"]),
            f"{row['differing']} of {row['pairs']}",
            f"{row['relative']:.1e}" if row["relative"] else "-",
        )
        for row in rows
    ]
    return output.fill(output.table("STEP", "DIFFER", "LARGEST RELATIVE DIFFERENCE"), cells)
