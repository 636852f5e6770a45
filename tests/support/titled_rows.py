"""A table of a document: rows by their title, between two marks; the text around them is written by hand."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path


def write(path: Path, name: str, *, provenance: str, head: str, rows: Mapping[str, str], titles: Iterable[str]) -> None:
    """Write rows into a file; those that are there already and are not given stay as they are.

    Args:
        path: of the document.
        name: of the table, in its marks.
        provenance: a sentence above it.
        head: its first two lines.
        rows: the new ones by their title.
        titles: of all rows, in their order.
    """
    begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->\n"
    text = path.read_text() if path.exists() else f"{begin}{end}"
    before, _, rest = text.partition(begin)
    old, _, behind = rest.partition(end)
    known = {line.split(" | ")[0].strip("| "): line for line in old.splitlines() if line.startswith("| ")}
    known |= {cell(title): row for title, row in rows.items()}
    lines = [known[cell(title)] + "\n" for title in titles if cell(title) in known]
    path.write_text(f"{before}{begin}{provenance}\n\n{head}{''.join(lines)}{end}{behind}")


def cell(text: str) -> str:
    """Return a text as one cell: one line, without what would end it."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|").strip()
