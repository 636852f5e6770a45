"""Attacks: their description, their result, and the decorator that registers them.

An attack is a function registered by `attack`. It takes the number of tries, makes the attack with real processes of real
users against a real hookd, and returns a `Result`. `Result.succeeded` counts the tries that reached the attacker's goal:
hookd withstands the attack if it is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

VICTIM, ATTACKER = 20001, 20002
"""Users (and groups) of the two sides. They are not root, and need no entry in /etc/passwd."""
ACTORS = ("another user", "a target", "a network peer", "a plugin author", "an accident")
"""Who attacks. An accident is something that nobody intends: a full disk, a clock that jumps, a daemon that is stopped."""


@dataclass(frozen=True)
class Result:
    """The result of an attack.

    Attributes:
        tries: how often the attack was made.
        succeeded: how often it reached its goal.
        seen: what was measured, or what hookd said, for the table; one line.
    """

    tries: int
    succeeded: int
    seen: str


@dataclass(frozen=True)
class Attack:
    """An attack that has not been made yet.

    Attributes:
        actor: one of ACTORS.
        chapter: the name of the module that registers it.
        title: what the attacker does, and for which purpose.
        tries, short: how often it is tried in the full and in the short form.
        is_long: its short form takes longer than the others: it runs under `make long`, not under `make test`.
        play: makes the attack; takes the number of tries.
    """

    name: str
    chapter: str
    actor: str
    title: str
    tries: int
    short: int
    is_long: bool
    play: Callable[[int], Result]


NOT_MADE = "not made on this machine"
"""The beginning of a row in place of a result, where there is none."""


class Impossible(Exception):  # noqa: N818  says what is so
    """The attack cannot be made on this machine; the text says why."""


ATTACKS: dict[str, Attack] = {}


def attack(
    actor: str, title: str, *, tries: int = 1, short: int = 1, is_long: bool = False
) -> Callable[[Callable[[int], Result]], Callable[[int], Result]]:
    """Register a function as an attack, under the function's name."""
    assert actor in ACTORS, actor

    def register(play: Callable[[int], Result]) -> Callable[[int], Result]:
        name = play.__name__.strip("_")
        assert name not in ATTACKS, name
        ATTACKS[name] = Attack(name, play.__module__.rpartition(".")[2], actor, title, tries, short, is_long, play)
        return play

    return register
