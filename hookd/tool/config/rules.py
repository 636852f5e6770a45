"""Rules for the processes that a daemon attaches to automatically.

    [[rule]]
    match = "train.py"                    # in the command line, or a glob for the whole of it
    user = "alice"                        # a name or a number
    cgroup = "/kubepods*"                 # in the process's cgroup, or a glob for the whole of it
    environment = { TEAM = "vision-*" }   # variables that it was started with, as globs
    plugins = ["nan", "timing"]           # by default those of [attach]

    [[rule]]
    match = "debug"
    attach = false                        # do not attach to these

All conditions of a rule must hold, and the first matching rule decides. If none matches, the daemon attaches to a process
that has HOOKD=1 in its environment. HOOKD_DISABLE=1 there overrides everything.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hookd.tool.config.tables import read_tables, read_texts
from hookd.tool.config.values import PluginSpec, read_plugins, read_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True)
class Traits:
    """The properties of a process that rules are matched against.

    Attributes:
        cmdline: the words of the command line, separated by blanks.
        user: the uid of its owner as text, and the user name if the uid has one here.
        cgroup: its path in the unified hierarchy, or in the first hierarchy that it has.
        environment: that it was started with, even if it has moved it to make room for its title.
    """

    cmdline: str
    user: frozenset[str]
    cgroup: str
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Rule:
    """One `[[rule]]`. A condition that is None always holds.

    Attributes:
        attach: False if the daemon must not attach to these processes.
        plugins: plugins to enable; if empty, the daemon's own choice.
        number: its place in the file, from 1; 0 if it is not from a file.
    """

    match: str | None = None
    user: str | None = None
    cgroup: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    attach: bool = True
    plugins: tuple[PluginSpec, ...] = ()
    number: int = field(default=0, compare=False)

    @property
    def description(self) -> str:
        """The rule in words, for a log: its number and its conditions."""
        expected = {"match": self.match, "user": self.user, "cgroup": self.cgroup, **self.environment}
        conditions = ", ".join(f"{name}={value}" for name, value in expected.items() if value is not None)
        return f"rule {self.number} ({conditions})" if self.number else f"{conditions} of its environment"

    def fits(self, traits: Traits) -> bool:
        """Whether all conditions hold."""
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
"""The process itself asks for an attach. This rule comes after those of the configuration."""


def fits(pattern: str, text: str) -> bool:
    """Whether a text contains the pattern, or matches it as a glob."""
    return pattern in text or fnmatch.fnmatchcase(text, pattern)


def decide(rules: tuple[Rule, ...], traits: Traits) -> Rule | None:
    """Return the rule to attach to a process by, or None."""
    rule = next((rule for rule in (*rules, ASKED_FOR) if rule.fits(traits)), None)
    return rule if rule is not None and rule.attach else None


def read_rules(content: object, source: str, problems: list[str]) -> tuple[Rule, ...]:
    """Read the array of tables `[[rule]]`, and append mistakes to `problems`."""
    tables = read_tables(content, "rule", source, _READERS, problems)
    if isinstance(content, list):
        for (where, _), table in zip(tables, content, strict=False):
            if not _CONDITIONS & set(table):
                problems.append(f'{where} has no condition; match = "*" matches every training process')
    return tuple(Rule(**values, number=number) for number, (_, values) in enumerate(tables, 1))


def _read_user(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        raise ValueError("is not a user; write a name or a number")
    return str(value)


def _read_flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("is neither true nor false")  # noqa: TRY004  all readers raise the same
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
