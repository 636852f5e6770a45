"""What the daemon itself finds out about its targets, beyond what their pages say: who waits for whom, who is slow."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hookd.tool.daemon.fleet.targets import Target


class Declared(NamedTuple):
    """A family of the daemon's own: its name without `_total`, kind (gauge or counter) and help; labels beside run and rank."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()


class Sample(NamedTuple):
    """A value of one target. `labels` stand beside run and rank."""

    family: Declared
    labels: Mapping[str, str]
    value: float


class Watcher(Protocol):
    """Looks at all targets after each poll, and has something to say of each at a scrape.

    What a person should be told goes to `Fleet.tell`.

    Attributes:
        families: all that its samples may be of.
    """

    families: Sequence[Declared]

    def look(self, targets: Sequence[Target]) -> None:
        """Look at the copies that a poll has just made (`Target.last`): all targets, those that linger too.

        Called about once a second, never twice at a time, in a thread that may block shortly.
        """

    def samples(self, target: Target) -> Iterable[Sample]:
        """Give what is known of one target by now; called by another thread than `look`, and must not wait for it."""
