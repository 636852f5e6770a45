"""The interface of watchers, which derive facts from all targets together: hangs, stragglers, drift."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hookd.tool.daemon.fleet.targets import Target


class Declared(NamedTuple):
    """A metric family of the daemon: its name without `_total`, kind (gauge or counter), help, and labels except run and rank."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()


class Sample(NamedTuple):
    """A value of one target; `labels` are those except run and rank."""

    family: Declared
    labels: Mapping[str, str]
    value: float


class Watcher(Protocol):
    """The protocol of a watcher, which judges all targets after each poll and has samples of each at a scrape.

    It reports incidents through `Fleet.report`.

    Attributes:
        families: all families that its samples may belong to.
    """

    families: Sequence[Declared] = ()

    def poll(self, targets: Sequence[Target]) -> None:
        """Judge the copies that a poll has just made (`Target.last`), of all targets including those that linger.

        Called about once a second, never concurrently, in a thread that may block briefly.
        """

    def samples(self, target: Target) -> Iterable[Sample]:  # noqa: ARG002  for watchers without samples
        """Return the current samples of one target. Called in another thread than `poll`, for which it must not wait."""
        return ()
