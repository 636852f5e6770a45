"""Who is told of the calls of modules that have the same listeners. Runs in the target."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookd.api.hookspecs import FLOWS, TIMES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hookd.target.plugins.listeners import Listener

_AFTER = ("forward", "output_summary", "root_forward")
"""Hooks that are called when a module has returned."""


class Heard:
    """The listeners that are switched on, as one call of a module needs them.

    Args:
        listeners: all of them, in the order of calling.
        recompute: whether this is for calls made again by activation checkpointing inside a backward.

    Attributes:
        before: are told before the module runs,
        root_before: and of the outermost call of a model as a whole.
        after: are told when it has returned,
        root_after: likewise.
        is_told_before: whether anything of all that is to be done before the module runs,
        is_told_after: or when it has returned.
        holds: whether the call is handed over in a portion.
        suspects: whether somebody is to be told of it if it is a suspect.
        remembers: whether what it returns is remembered; a portion does that by itself.
        wants_versions: whether somebody wants the versions of its inputs.
        wants_is_again: whether somebody wants to know if it is inside of another call of the module.
        is_timed: whether anybody wants the time, now or in other steps: who called it is told its own time without this one.
        is_replaced: whether anybody may replace what the module returns, so that nothing can be concluded from its inputs.
        has_flows: whether anybody listens to its gradients, now or in other steps.
    """

    __slots__ = (
        "after", "before", "has_flows", "holds", "is_replaced", "is_timed", "is_told_after", "is_told_before", "remembers", "root_after", "root_before", "suspects", "wants_is_again", "wants_versions",
    )  # fmt: skip

    def __init__(self, listeners: tuple[Listener, ...], *, recompute: bool) -> None:
        # A recompute must give what the first pass gave, so what changed that pass is called again, as torch's hooks are.
        told = [one for one in listeners if not recompute or one.mutates or "recompute" in one.arguments]
        on = [one for one in told if one.is_on]
        self.before = [one for one in on if one.hook == "forward_pre"]
        self.root_before = [one for one in on if one.hook == "root_forward_pre"]
        self.after = [one for one in on if one.hook in ("forward", "output_summary")]
        self.root_after = [one for one in on if one.hook == "root_forward"]
        portions = [one for one in on if one.hook == "forwards"]
        self.holds = bool(portions)
        # A plugin that looks at all calls that are handed over finds the suspects itself.
        looking = {one.plugin for one in portions}
        self.suspects = not recompute and any(one.hook == "suspect" and one.plugin not in looking for one in on)
        self.remembers = not recompute and remembers(listeners) and not any(one.remembers for one in portions)
        told_after = [one for one in told if one.hook in _AFTER]
        wanted = {name for one in told_after if one.is_on for name in one.arguments}
        self.wants_versions = self.holds or self.suspects or "versions" in wanted
        self.wants_is_again = "is_again" in wanted
        self.is_timed = is_timed(told)
        self.is_replaced = any(one.mutates and one.hook != "root_forward" for one in told_after)
        self.has_flows = any(one.hook in FLOWS for one in listeners)
        self.is_told_before = bool(self.before or self.root_before or self.has_flows or self.wants_versions)
        self.is_told_after = bool(self.after or self.root_after or self.has_flows or self.holds or self.suspects)


class Shape:
    """All modules that have the same listeners.

    Args:
        listeners: in the order of calling.
        number: of the shape, for the entry in C.

    Attributes:
        mutates: whether any of them may change the training.
        heard: who is told of a call, and of a recompute; None until `find` has found out.
        armed: for which switches the entry in C was told what to do; None: not yet.
    """

    __slots__ = ("__weakref__", "armed", "heard", "listeners", "mutates", "number")

    def __init__(self, listeners: tuple[Listener, ...], number: int) -> None:
        self.listeners, self.number = listeners, number
        self.mutates = any(one.mutates for one in listeners)
        self.heard: list[Heard | None] = [None, None]
        self.armed: tuple[bool, ...] | None = None

    def find(self, recompute: bool) -> Heard:
        """Find out who is told of a call that is made now."""
        known = self.heard  # another one once a switch is turned, so that nothing old is noted after that
        heard = known[recompute] = Heard(self.listeners, recompute=recompute)
        return heard

    def turned(self) -> None:
        """Find out again who is told: a switch was turned."""
        self.heard = [None, None]


def is_timed(listeners: Iterable[Listener]) -> bool:
    """Whether anybody wants the time of a call, now or in other steps."""
    return any(one.hook in _AFTER and not TIMES.isdisjoint(one.arguments) for one in listeners)


def remembers(listeners: tuple[Listener, ...]) -> bool:
    """Whether what a call returns is remembered, for any of these."""
    return any(one.remembers and one.hook in ("forward", "forwards") for one in listeners)


def without_output(listeners: list[Listener]) -> list[Listener]:
    """Return who is told of a recompute that torch ends as soon as it has what it needs: there is no output."""
    return [one for one in listeners if not one.mutates and "output" not in one.arguments]
