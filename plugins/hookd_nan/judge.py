"""Find the origin of the first NaN or infinity in a sequence of events.

The code here sees no tensors, only events in the order of execution.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypedDict, cast

if TYPE_CHECKING:
    from collections.abc import Collection

    from typing_extensions import Unpack


class Details(TypedDict, total=False):
    """More fields of an incident."""

    parameter: str
    """Name of the bad parameter or buffer in its module."""
    is_buffer: bool
    """Set if it is a buffer."""
    nan_count: int
    inf_count: int
    elements: int
    shape: list[int] | None
    """None for a nested tensor."""
    dtype: str
    inputs: str
    """Why the inputs may have been bad before."""
    neginf_in: str | list[str]
    """Where -inf was taken for a mask: "inputs", or the modules with such an output."""
    or_in: list[str]
    """Other modules that may be the origin."""
    if_used_in: str
    """The module that may use the parameter without a call of its module."""
    elsewhere: str
    """A bad tensor of another module."""
    buffer: str
    """A bad buffer that is not blamed."""
    parameters: str
    """Set if a parameter inside of the module is bad, but may have gone bad later."""
    gradients: str
    """Set if gradients were used without a check; then the next two are set as well."""
    bad_parameters: int
    """Their number."""
    last_bad: str
    """The last of them in the model's order."""
    unread: list[str]
    """Earlier checks of the step whose values could not be read from their device; they may be the origin."""
    since_if_used: int
    """The step in which the parameter went bad, if it is used in every step."""


@dataclass(frozen=True)
class Event:
    """The result of a check at one place.

    Attributes:
        where: "output", "input", "param", "grad" or "loss".
        kind: "" for good values, else "inf" or "nan".
        module: name of the module.
        step: step of the check.
        stack: names of the modules being called, the outermost first.
        inputs: as `kind`, for the module's inputs; for a module's gradient, for the gradient of its output.
        thread: identifier of the training thread.
        order: number of this event; later events have higher numbers.
        reached: for a module's gradient, the number at which the gradient of its output arrived.
        since: first step in which the bad value may have originated, 0 if unknown.
        is_certain: the bad value originated at this place, and was not only noticed there.
        is_late: the training code has continued since the check.
        ends: smallest and largest element, if they came from a device.
        at: how many calls had returned before this one; None for all.
        details: more fields of the incident.
        own_since: as `since`, for the module's own parameters.
        optimizer: number of the optimizer that holds the parameters, 0 for one that has never stepped.
        is_first_step: that optimizer makes its first step now.
        may_write: the call may itself have written the module's buffers.
        bad: positions of the bad tensors among those checked, if their values came from a device.
        own: names of the module's own parameters and buffers, if their values come from a device.
        unread: of which tensors values could not be read from their device, while the others were good: 0 for the event's own,
            1 for its inputs, 2 and 3 for the module's own parameters and buffers.
    """

    where: str
    kind: str
    module: str
    step: int
    stack: tuple[str, ...] = ()
    inputs: str = ""
    thread: int = 0
    order: int = 0
    reached: int = 0
    since: int = 0
    is_certain: bool = True
    is_late: bool = False
    ends: tuple[float, float] | tuple[()] = ()
    at: int | None = None
    details: Details = field(default_factory=Details)
    own_since: int = 0
    optimizer: int = 0
    is_first_step: bool = False
    may_write: bool = False
    bad: tuple[int, ...] = ()
    own: tuple[list[str], ...] = ()
    unread: tuple[int, ...] = ()

    @property
    def is_unread(self) -> bool:
        """Whether the event could not be judged: its kind is "" although its own values may be bad."""
        return 0 in self.unread

    def having(self, **details: Unpack[Details]) -> Event:
        """Return the event with more details, or with other values of them."""
        return replace(self, details={**self.details, **details})

    def without(self, *names: str) -> Event:
        """Return the event without some details."""
        kept = {name: value for name, value in self.details.items() if name not in names}
        return replace(self, details=cast("Details", kept))

    def blamed_own(self, parameters: str, buffers: str) -> Event:
        """Return the event with the module's own tensors blamed for its bad output, if they are bad.

        Args:
            parameters: "inf" or "nan" if a parameter has one, else "".
            buffers: the same for buffers. They are blamed last: an infinity may be a legitimate value ("best loss so far").
        """
        if parameters or (buffers and not self.inputs and not self.may_write):
            event = replace(self, where="param", kind=parameters or buffers, since=self.own_since)
            return event.without("inputs", "neginf_in")
        return self

    def named_own(self, parameters: tuple[int, ...], buffers: tuple[int, ...]) -> Event:
        """Return the event with the name of the blamed parameter or buffer, given the positions of the bad ones."""
        for names, bad, are_buffers in zip(self.own, (parameters, buffers), (False, True)):
            if self.where == "param" and bad:
                named = self.having(parameter=names[bad[0]])
                return named.having(is_buffer=True) if are_buffers else named
        return self


class Looks:
    """The last two steps in which something was checked; 0 for none."""

    def __init__(self) -> None:
        self.before = self.latest = 0

    def note(self, step: int) -> None:
        """Record a check in this step."""
        if step != self.latest:
            self.before, self.latest = self.latest, step

    def since(self, step: int) -> int:
        """Return the first step in which a bad value found in `step` may have existed unseen; 0 if unknown."""
        last = self.last(step)
        return last + 1 if last else 0

    def last(self, step: int) -> int:
        """Return the last step before `step` with a check; 0 if unknown."""
        return self.before if self.latest == step else self.latest


@dataclass
class Known:
    """The bad calls and gradients that a judge has not decided on yet.

    Attributes:
        first: the first bad gradient in a backward since gradients were last known to be good.
        in_a_row: by optimizer: the skipped steps in a row.
    """

    pending: dict[int, Event] = field(default_factory=dict)
    suspects: dict[int, Event] = field(default_factory=dict)
    settled: set[int] = field(default_factory=set)
    skipped: int = 0
    first: Event | None = None
    in_a_row: dict[int, int] = field(default_factory=dict)


class Judge:
    """Finds the origin in a sequence of events, given in the order of execution.

    Each method that judges returns the event of the origin, with the `where` and `module` to report, or None.
    Optimizers are identified by numbers (`Event.optimizer`).
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._known = Known()

    def succeed(self, predecessor: Judge) -> None:
        """Go on with the knowledge of a predecessor; the events that it still has to judge change it for both."""
        self._known = predecessor._known  # noqa: SLF001
        predecessor._patience = self._patience  # noqa: SLF001

    @property
    def pending(self) -> dict[int, Event]:
        """By thread: a call with bad inputs; its caller decides when it returns."""
        return self._known.pending

    @property
    def suspects(self) -> dict[int, Event]:
        """By optimizer: its bad gradients, until their fate is known."""
        return self._known.suspects

    @property
    def settled(self) -> set[int]:
        """Optimizers whose bad gradients have a known fate; the gradients may stay in memory for a while."""
        return self._known.settled

    @property
    def skipped(self) -> int:
        """Number of steps in which bad gradients were discarded."""
        return self._known.skipped

    @property
    def is_suspicious(self) -> bool:
        """Whether there is a bad gradient whose fate is unknown."""
        return self._known.first is not None or bool(self.suspects)

    @property
    def is_calm(self) -> bool:
        """Whether no bad gradient is remembered, so that good gradients change nothing."""
        return not (self.is_suspicious or self.settled or self._known.in_a_row)

    def call(self, event: Event) -> Event | None:
        """Judge a module call that has returned; `where` is "output", or "param" if one of its own parameters is bad."""
        waiting = self.pending.get(event.thread)
        if waiting is not None and len(event.stack) < len(waiting.stack):
            del self.pending[event.thread]
            if not event.inputs and not event.kind and not event.is_unread:
                # Made between the two calls, and removed again before the outer one returned.
                return replace(waiting, where="input", details={})
            event = replace(event, kind=event.kind or waiting.kind)
        if not event.kind:
            return None
        if event.where == "param" or not event.inputs:
            return event
        if len(event.stack) <= 1:
            return replace(event, where="input", kind=event.inputs, details={})
        self.pending[event.thread] = event
        return None

    def root(self, event: Event) -> Event | None:
        """Judge the call of a root whose modules were not checked."""
        if event.kind and event.inputs:
            return replace(event, where="input", kind=event.inputs, is_certain=True, details={})
        return event if event.kind else None

    def flow(self, event: Event) -> None:
        """Keep the first bad gradient in a backward until its fate is known."""
        if event.kind and (self._known.first is None or event.order < self._known.first.order):
            self._known.first = event

    def gradients(self, event: Event) -> None:
        """Keep the bad gradients of an optimizer's parameters after a backward until their fate is known."""
        if event.kind and event.optimizer not in self.settled:
            self.suspects.setdefault(event.optimizer, event)

    def loss(self, event: Event, *, cleared: Collection[int], is_clear: bool) -> Event | None:
        """Judge the start of a backward.

        Args:
            event: the loss.
            cleared: the optimizers that hold no bad gradient of an earlier backward any more.
            is_clear: no optimizer holds one any more.
        """
        origin = None
        self.settled.difference_update(cleared)
        if not self.suspects and self._known.first is not None and is_clear:
            return self._skip(0) or (event if event.kind else None)
        for optimizer in [one for one in self.suspects if one in cleared]:
            origin = origin or self._skip(optimizer)
        return origin or (event if event.kind else None)

    def step(self, event: Event, *, found_inf: bool) -> Event | None:
        """Judge the gradients that an optimizer is about to use or, with `found_inf`, to discard."""
        if event.is_first_step and (event.kind or found_inf):
            unknown = self.suspects.pop(0, None)  # its number after the backward, before its first step
            self.suspects.update({} if unknown is None else {event.optimizer: unknown})
        (self.settled.add if event.kind or found_inf else self.settled.discard)(event.optimizer)
        if found_inf:
            return self._skip(event.optimizer, event)
        first, suspect = self._known.first, self.suspects.pop(event.optimizer, None)
        for optimizer in (event.optimizer, 0) if event.is_first_step else (event.optimizer,):
            self._known.in_a_row.pop(optimizer, None)
        if event.kind or not self.suspects:
            self._known.first = None
        found = first or suspect
        return (found if found is not None and found.module else event) if event.kind else None

    def _skip(self, optimizer: int, suspect: Event | None = None) -> Event | None:
        suspect = self.suspects.pop(optimizer, suspect)
        found = self._known.first or suspect
        if not self.suspects:
            self._known.first = None
        self._known.skipped += 1
        self._known.in_a_row[optimizer] = self._known.in_a_row.get(optimizer, 0) + 1
        return found if self._known.in_a_row[optimizer] >= self._patience else None
