"""Programs in a page of the documents, each with its output below it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from tests.support.environment import REPOSITORY

if TYPE_CHECKING:
    import pytest

_EXAMPLE = re.compile(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", re.MULTILINE | re.DOTALL)


class Example(NamedTuple):
    """A program and its output."""

    code: str
    printed: str

    def run(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Run the program here; check that its output is the one in the page."""
        capsys.readouterr()
        exec(compile(self.code, "docs", "exec"), {"__name__": "__main__"})
        assert capsys.readouterr().out.splitlines()[-1] == self.printed.strip()


def examples(page: str, library: str) -> list[Example]:
    """Return those of a page that import a library."""
    found = [Example(*parts) for parts in _EXAMPLE.findall((REPOSITORY / "docs" / page).read_text("utf-8"))]
    chosen = [one for one in found if re.search(rf"^(?:from|import) {library}\b", one.code, re.MULTILINE)]
    assert chosen, f"docs/{page} has no example of {library}"
    return chosen
