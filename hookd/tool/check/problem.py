"""A problem in a plugin, with its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict


class ProblemRow(TypedDict):
    """A problem, as `hookd plugin check --json` prints it; for the fields see `Problem`."""

    file: str
    line: int
    rule: str
    message: str
    fix: str
    is_warning: bool


@dataclass(frozen=True, order=True)
class Problem:
    """A problem that the plugin's author should fix.

    Attributes:
        file: path as the author knows it; "" if the problem is not in a file.
        line: from 1; 0 if the problem has no line.
        rule: a short word: hook, argument, default, wrapper, return, blocking, ranks, random, attribute, metric, label, import, name,
            api, types, raised, changed, source.
        message: what is wrong.
        fix: what to do.
        is_warning: True if the check does not fail because of it.
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

    def as_json(self) -> ProblemRow:
        """Return the object that `--json` prints."""
        return {
            "file": self.file, "line": self.line, "rule": self.rule, "message": self.message, "fix": self.fix,
            "is_warning": self.is_warning,
        }  # fmt: skip
