"""Play all faults, and write what hookd said of each into `docs/findings.md`."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from tests.faults.learning import FAULTS, play
from tests.support import titled_rows

DOCUMENT = Path(__file__).parents[3] / "docs" / "findings.md"
HEAD = "| Mistake | Found after | What hookd said |\n|---|---|---|\n"


def main() -> None:
    """Write the table."""
    rows = {}
    for fault in FAULTS:
        first = play(fault, is_wrong=True, steps=fault.since + fault.within)[0]
        title = titled_rows.cell(inspect.getdoc(fault.train) or "")
        words = re.sub(r" at step \d+( \(counted from the attach\))?$", "", titled_rows.cell(first["message"]))
        rows[title] = f"| {title} | {_steps(first['step'] - fault.since)} | `{first['kind']}`: {words} |"
    provenance = "Written by `python -m tests.faults.learning`, with the default plugins at their default rates, in steps of 35 ms."
    titled_rows.write(DOCUMENT, "findings", provenance=provenance, head=HEAD, rows=rows, titles=list(rows))


def _steps(count: int) -> str:
    return "the same step" if count == 0 else f"{count} step{'s' if count > 1 else ''}"


if __name__ == "__main__":
    main()
