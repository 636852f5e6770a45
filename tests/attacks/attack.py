"""What an attack is, and how one is registered.

An attack is a function registered by `attack`. It is given how often to try, makes the attack with real processes of real
users against a real hookd, and returns a `Result`. `Result.succeeded` counts the tries that reached the attacker's goal:
hookd holds where it is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

VICTIM, ATTACKER = 20001, 20002
"""Users (and groups) of the two sides. They need no entry in /etc/passwd, and are not root."""
ACTORS = ("another user", "a target", "a network peer", "a plugin author", "an accident")
"""Who attacks; an accident is what nobody intends: a full disk, a clock that jumps, a daemon that is stopped."""


@dataclass(frozen=True)
class Result:
    """What came of an attack.

    Attributes:
        tries: how often it was made.
        succeeded: how often the attacker reached the goal.
        seen: what was measured or what hookd said, for the table; one line.
    """

    tries: int
    succeeded: int
    seen: str


@dataclass(frozen=True)
class Attack:
    """An attack before it is made.

    Attributes:
        actor: one of ACTORS.
        chapter: the module that registers it.
        title: what the attacker does, and to what end.
        tries, short: how often it is tried in full and in the short form.
        is_long: its short form takes longer than the others: `make long` makes it, and `make test` does not.
        play: makes it, given how often to try.
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
"""How a result begins that is none."""


class Impossible(Exception):  # noqa: N818  says what is so
    """The attack cannot be made on this machine; the text says why."""


ATTACKS: dict[str, Attack] = {}


def attack(
    actor: str, title: str, *, tries: int = 1, short: int = 1, is_long: bool = False
) -> Callable[[Callable[[int], Result]], Callable[[int], Result]]:
    """Register an attack under the name of its function."""
    assert actor in ACTORS, actor

    def register(play: Callable[[int], Result]) -> Callable[[int], Result]:
        name = play.__name__.strip("_")
        assert name not in ATTACKS, name
        ATTACKS[name] = Attack(name, play.__module__.rpartition(".")[2], actor, title, tries, short, is_long, play)
        return play

    return register
