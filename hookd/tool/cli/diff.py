"""`hookd diff A B`: tell where two runs part."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

import click

from hookd.tool.cli import options, output

if TYPE_CHECKING:
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
    """`data`, `weights`, `forward`, `loss`, `backward`, `gradients`, `settings`, `state`, `update` or `buffers`; "" if unknown."""
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


FIRST, LAST = 5, 3
"""Steps that the table shows after the first difference, and at the end."""


@click.command(short_help="Compare two fingerprints: where do the runs part?")
@click.argument("a", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("b", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--tolerance", type=click.FloatRange(min=0), default=0.0, metavar="X",
              help="Largest relative difference of norms and of extreme elements that counts as equal.  [default: 0, equal bits]")  # fmt: skip
@click.option(
    "--map", "maps", multiple=True, metavar="OLD=NEW", help="B calls the module OLD of A NEW; may be repeated."
)
@click.option("--what", metavar="PHASES", help="Compare these phases only, separated by commas: data, weights, forward, loss, "
              "backward, gradients, state, update, buffers.  [default: all]")  # fmt: skip
@options.json
def diff(*, a: Path, b: Path, tolerance: float, maps: tuple[str, ...], what: str | None, as_json: bool) -> int:
    """Compare two fingerprints, which `hookd fingerprint` has recorded.

    The exit code is 0 if they are equal, 1 if they differ, and 2 if they cannot be compared.
    """
    from hookd.tool.fingerprints import comparison
    from hookd.tool.fingerprints.steps import PHASES

    if not all(one.count("=") == 1 for one in maps):
        raise click.BadParameter("write OLD=NEW", param_hint="--map")
    names = dict(one.split("=") for one in maps)
    phases = PHASES if what is None else tuple(what.split(","))
    if unknown := set(phases) - set(PHASES):
        raise click.BadParameter(f"{', '.join(sorted(unknown))}: choose from {', '.join(PHASES)}", param_hint="--what")
    found = compared(a, b, comparison.Terms(tolerance, names, frozenset(phases)))
    if as_json:
        output.emit(found)
    else:
        show(found)
    return found["code"]


def compared(a: Path, b: Path, terms: Terms | None = None) -> Parting:
    """Compare two files."""
    from hookd.tool.fingerprints import comparison, file

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
