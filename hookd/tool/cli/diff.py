"""`hookd diff A B`: tell where two runs part."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hookd.tool.cli import options, output

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.table import Table

    from hookd.tool.fingerprints.comparison import Growth

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
@options.json
def diff(*, a: Path, b: Path, tolerance: float, maps: tuple[str, ...], as_json: bool) -> int:
    """Compare two fingerprints, which `hookd fingerprint` has recorded.

    The exit code is 0 if they are equal, 1 if they differ, and 2 if they cannot be compared.
    """
    if not all(one.count("=") == 1 for one in maps):
        raise click.BadParameter("write OLD=NEW", param_hint="--map")
    names = dict(one.split("=") for one in maps)
    return report(a, b, tolerance=tolerance, names=names, as_json=as_json)


def report(
    a: Path, b: Path, *, tolerance: float = 0.0, names: Mapping[str, str] | None = None, as_json: bool = False
) -> int:
    """Compare two files, print the result, and return the exit code."""
    from hookd.tool.fingerprints import comparison, file

    found = comparison.compare(file.read(a), file.read(b), tolerance=tolerance, names=names)
    if as_json:
        output.emit(asdict(found))
        return found.code
    for line in (found.sentence, found.advice, *found.notes):
        if line:
            output.show(line)
    if found.growth:
        output.show(_table(found.growth))
    return found.code


def _table(growth: list[Growth]) -> Table:
    rows = growth if len(growth) <= FIRST + LAST else growth[:FIRST] + growth[-LAST:]
    cells = [
        (str(row.step), f"{row.differing} of {row.pairs}", f"{row.relative:.1e}" if row.relative else "-")
        for row in rows
    ]
    return output.fill(output.table("STEP", "DIFFER", "LARGEST RELATIVE DIFFERENCE"), cells)
