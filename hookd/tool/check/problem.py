"""Something that an author should mend, and where."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, order=True)
class Problem:
    """One finding.

    Attributes:
        file: where it is, as the author knows the file; "" where there is no file.
        line: from 1; 0 where there is none.
        rule: a short word: hook, argument, default, wrapper, return, blocking, ranks, random, attribute, metric, label, import, name,
            api, types, raised, changed, source.
        message: what is wrong.
        fix: what to do.
        is_warning: it does not fail the check.
    """

    file: str
    line: int
    rule: str
    message: str
    fix: str = ""
    is_warning: bool = False

    @property
    def where(self) -> str:
        """`file:line`, as editors understand it."""
        return f"{self.file}:{self.line}" if self.line else self.file

    def as_json(self) -> dict[str, Any]:
        """Give it as `--json` prints it."""
        return asdict(self)
