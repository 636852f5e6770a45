"""Which processes a daemon attaches to by itself. Tool side.

    [[rule]]
    match = "train.py"                    # in the command line, or a glob of the whole of it
    user = "alice"                        # a name or a number
    cgroup = "/kubepods*"                 # in the process's cgroup, or a glob of the whole of it
    environment = { TEAM = "vision-*" }   # variables with which it was started, as globs
    plugins = ["nan", "timing"]           # else those of [attach]

    [[rule]]
    match = "debug"
    attach = false                        # leave these alone

All conditions of a rule must hold, and the first rule that fits decides. Where none does, HOOKD=1 in the environment
of a process means attach. HOOKD_DISABLE=1 there wins over everything.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hookd.tool.config.tables import read_tables, read_text, read_texts
from hookd.tool.config.values import PluginSpec, read_plugins

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True)
class Traits:
    """What the rules look at in a process.

    Attributes:
        cmdline: the words, with a blank between them.
        user: the names it goes by: that of its owner, if there is one here, and the number.
        cgroup: its path in the unified hierarchy, or in the first one that it has.
        environment: with which it was started, or that it has moved to put its title there.
    """

    cmdline: str
    user: frozenset[str]
    cgroup: str
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Rule:
    """One `[[rule]]`. A condition that is None is not asked for.

    Attributes:
        attach: False: leave these processes alone.
        plugins: what to enable; empty: the daemon's own choice.
        number: its place in the file, from 1; 0: it stands in none.
    """

    match: str | None = None
    user: str | None = None
    cgroup: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    attach: bool = True
    plugins: tuple[PluginSpec, ...] = ()
    number: int = field(default=0, compare=False)

    @property
    def told(self) -> str:
        """Name the rule in a line of a log: its number and what it asks for."""
        asked = {"match": self.match, "user": self.user, "cgroup": self.cgroup, **self.environment}
        conditions = ", ".join(f"{name}={value}" for name, value in asked.items() if value is not None)
        return f"rule {self.number} ({conditions})" if self.number else f"{conditions} of its environment"

    def fits(self, traits: Traits) -> bool:
        """Say whether all conditions hold."""
        return (
            (self.match is None or fits(self.match, traits.cmdline))
            and (self.user is None or self.user in traits.user)
            and (self.cgroup is None or fits(self.cgroup, traits.cgroup))
            and all(
                name in traits.environment and fnmatch.fnmatchcase(traits.environment[name], pattern)
                for name, pattern in self.environment.items()
            )
        )


ASKED_FOR = Rule(environment={"HOOKD": "1"})
"""Comes after those of the configuration: the process itself asks for it."""


def fits(pattern: str, text: str) -> bool:
    """Say whether a text contains the pattern, or matches it as a glob."""
    return pattern in text or fnmatch.fnmatchcase(text, pattern)


def decide(rules: tuple[Rule, ...], traits: Traits) -> Rule | None:
    """Give the rule by which to attach to a process; None if it is to be left alone."""
    rule = next((rule for rule in (*rules, ASKED_FOR) if rule.fits(traits)), None)
    return rule if rule is not None and rule.attach else None


def read_rules(content: object, source: str, problems: list[str]) -> tuple[Rule, ...]:
    """Read the array of tables `[[rule]]`; what is wrong is appended to `problems`."""
    tables = read_tables(content, "rule", source, _READERS, problems)
    if isinstance(content, list):
        for (where, _), table in zip(tables, content, strict=False):
            if not _CONDITIONS & set(table):
                problems.append(f'{where} has no condition; match = "*" takes every training process')
    return tuple(Rule(**values, number=number) for number, (_, values) in enumerate(tables, 1))


def _read_user(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        raise ValueError("is no user; write a name or a number")
    return str(value)


def _read_flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("is neither true nor false")  # noqa: TRY004  one kind of error for every reader
    return value


_READERS: Mapping[str, Callable[[object], Any]] = {
    "match": read_text,
    "user": _read_user,
    "cgroup": read_text,
    "environment": read_texts,
    "attach": _read_flag,
    "plugins": read_plugins,
}
_CONDITIONS = {"match", "user", "cgroup", "environment"}
