"""Module groups: the listeners that several modules share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookd.api.hookspecs import FLOWS, TIMES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hookd.target.plugins.listeners import Listener

_AFTER = ("forward", "output_summary", "root_forward")
"""Hooks that are called when a module has returned."""


class ActiveListeners:
    """The listeners that are switched on, arranged for a call of a module.

    Args:
        recompute: whether this is for recomputes: calls that activation checkpointing repeats inside a backward.

    Attributes:
        before: listeners that are called before the module runs.
        root_before: the same, for the outermost call of a model as a whole.
        after: listeners that are called when the module has returned.
        root_after: the same, for the outermost call of a model as a whole.
        acts_before: whether there is anything to do before the module runs.
        acts_after: whether there is anything to do when it has returned.
        holds: whether the call is handed over in a portion.
        suspects: whether the call is checked and reported if it is a suspect.
        remembers: whether the output is recorded here; a portion records its outputs itself.
        wants_versions: whether the versions of the inputs are needed.
        wants_is_nested: whether a listener asks if the call is inside another call of the same module.
        is_timed: whether a listener takes the time, in this or in other steps. The time is needed in all steps, because it is
            deducted from the caller's own time.
        is_replaced: whether a listener may replace the output, so that nothing can be inferred from the inputs.
        has_flows: whether a plugin listens to its gradients, in this or in other steps.
    """

    __slots__ = (
        "acts_after", "acts_before", "after", "before", "has_flows", "holds", "is_replaced", "is_timed", "remembers",
        "root_after", "root_before", "suspects", "wants_is_nested", "wants_versions",
    )  # fmt: skip

    def __init__(self, listeners: tuple[Listener, ...], *, recompute: bool) -> None:
        # A recompute must return what the first pass returned, so mutators are called again, as torch's hooks are.
        called = [
            listener for listener in listeners if not recompute or listener.mutates or "recompute" in listener.arguments
        ]
        on = [listener for listener in called if listener.is_on]
        self.before = [listener for listener in on if listener.hook == "forward_pre"]
        self.root_before = [listener for listener in on if listener.hook == "root_forward_pre"]
        self.after = [listener for listener in on if listener.hook in ("forward", "output_summary")]
        self.root_after = [listener for listener in on if listener.hook == "root_forward"]
        portions = [listener for listener in on if listener.hook == "forwards"]
        self.holds = bool(portions)
        # A plugin that takes portions finds the suspects in them itself.
        looking = {listener.plugin for listener in portions}
        self.suspects = not recompute and any(
            listener.hook == "suspect" and listener.plugin not in looking for listener in on
        )
        self.remembers = not recompute and remembers(listeners) and not any(listener.remembers for listener in portions)
        after = [listener for listener in called if listener.hook in _AFTER]
        asked = {name for listener in after if listener.is_on for name in listener.arguments}
        self.wants_versions = self.holds or self.suspects or "versions" in asked
        self.wants_is_nested = "is_nested" in asked
        self.is_timed = is_timed(called)
        self.is_replaced = any(listener.mutates and listener.hook != "root_forward" for listener in after)
        self.has_flows = any(listener.hook in FLOWS for listener in listeners)
        self.acts_before = bool(self.before or self.root_before or self.has_flows or self.wants_versions)
        self.acts_after = bool(self.after or self.root_after or self.has_flows or self.holds or self.suspects)


class ModuleGroup:
    """The modules that have the same listeners.

    Attributes:
        mutates: whether any listener may change the training.
        active: the active listeners for a call, and for a recompute; None until `find` has set them.
        switches: the switches for which the C entry was last set; None if it was not set yet.
    """

    __slots__ = ("__weakref__", "active", "listeners", "mutates", "number", "switches")

    def __init__(self, listeners: tuple[Listener, ...], number: int) -> None:
        self.listeners, self.number = listeners, number
        self.mutates = any(listener.mutates for listener in listeners)
        self.active: list[ActiveListeners | None] = [None, None]
        self.switches: tuple[bool, ...] | None = None

    def find(self, recompute: bool) -> ActiveListeners:
        """Return the listeners for a call that is made now, and cache them."""
        known = self.active  # `turned` replaces this list, so an outdated result is not stored in the new one
        active = known[recompute] = ActiveListeners(self.listeners, recompute=recompute)
        return active

    def turned(self) -> None:
        """Drop the cached listeners, because a switch was turned."""
        self.active = [None, None]


def is_timed(listeners: Iterable[Listener]) -> bool:
    """Whether a listener takes the time of a call. Listeners that are switched off in this step count as well."""
    return any(listener.hook in _AFTER and not TIMES.isdisjoint(listener.arguments) for listener in listeners)


def remembers(listeners: tuple[Listener, ...]) -> bool:
    """Whether outputs are recorded for any of these listeners."""
    return any(listener.remembers and listener.hook in ("forward", "forwards") for listener in listeners)


def without_output(listeners: list[Listener]) -> list[Listener]:
    """Return the listeners for a recompute that torch ends early, so that it has no output."""
    return [listener for listener in listeners if not listener.mutates and "output" not in listener.arguments]
