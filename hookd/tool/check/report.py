"""The report on a plugin, as `hookd plugin check` prints it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hookd.testing.trials import HookCost
    from hookd.tool.check.problem import Problem, ProblemRow


class _Row(TypedDict):
    plugin: str
    """Its name; empty if no plugin can be found in the file."""
    side: str
    """`target` or `daemon`."""
    file: str
    hooks: Mapping[str, HookCost]
    """The cost of each hook that the trial training called."""
    uncalled: Sequence[str]
    """Hooks of modules that the small models never called."""
    is_run: bool
    """Whether the plugin was run."""
    is_typed: bool
    """Whether types could be checked."""
    problems: list[ProblemRow]


class ReportRow(_Row, total=False):
    """A plugin, as `hookd plugin check --json` prints it."""

    mutates: bool
    """Whether it declares that it changes the training; absent unless a model was trained with it."""
    daemon_hooks: Sequence[str]
    """The hooks that it implements; absent unless it was run in a simulated daemon."""


@dataclass
class CheckReport:
    """The state of a checked plugin; for the attributes see `ReportRow`. Keys that may be absent there may be None here."""

    plugin: str
    side: str
    file: str
    is_typed: bool
    problems: list[Problem]
    hooks: Mapping[str, HookCost] = field(default_factory=dict)
    uncalled: Sequence[str] = ()
    is_run: bool = False
    mutates: bool | None = None
    daemon_hooks: Sequence[str] | None = None

    @property
    def is_good(self) -> bool:
        """Whether there are warnings at most."""
        return all(problem.is_warning for problem in self.problems)

    def add(self, problems: Sequence[Problem]) -> None:
        """Add problems, keeping all of them sorted and each once."""
        self.problems = sorted({*self.problems, *problems})

    def as_json(self) -> ReportRow:
        """Return the object that `--json` prints."""
        row: ReportRow = {
            "plugin": self.plugin, "side": self.side, "file": self.file, "hooks": self.hooks, "uncalled": self.uncalled,
            "is_run": self.is_run, "is_typed": self.is_typed, "problems": [problem.as_json() for problem in self.problems],
        }  # fmt: skip
        if self.mutates is not None:
            row["mutates"] = self.mutates
        if self.daemon_hooks is not None:
            row["daemon_hooks"] = self.daemon_hooks
        return row
