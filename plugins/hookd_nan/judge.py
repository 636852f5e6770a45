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

    parameter: str  # name of the bad parameter or buffer in its module
    is_buffer: bool  # set if it is a buffer
    nan_count: int
    inf_count: int
    elements: int
    shape: list[int] | None  # None for a nested tensor
    dtype: str
    inputs: str  # why the inputs may have been bad before
    neginf_in: str | list[str]  # where -inf was taken for a mask: "inputs", or the modules with such an output
    or_in: list[str]  # other modules that may be the origin
    if_used_in: str  # the module that may use the parameter without a call of its module
    elsewhere: str  # a bad tensor of another module
    buffer: str  # a bad buffer that is not blamed
    parameters: str  # set if a parameter inside of the module is bad, but may have gone bad later
    gradients: str  # set if gradients were used without a check; then the next two are set as well
    bad_parameters: int  # their number
    last_bad: str  # the last of them in the model's order
    unread: list[str]  # earlier checks of the step whose values could not be read; they may be the origin
    since_if_used: int  # the step in which the parameter went bad, if it is used in every step


@dataclass(frozen=True)
class Event:
    """The result of a check at one place."""

    where: str  # "output", "input", "param", "grad" or "loss"
    kind: str  # "" for good values, else "inf" or "nan"
    module: str  # its name
    step: int
    stack: tuple[str, ...] = ()  # names of the modules being called, the outermost first
    inputs: str = ""  # as `kind`, for the module's inputs; for a module's gradient, for the gradient of its output
    thread: int = 0  # identifier of the training thread
    order: int = 0  # number of this event; later events have higher numbers
    reached: int = 0  # for a module's gradient, the number at which the gradient of its output arrived
    since: int = 0  # first step in which the bad value may have originated, 0 if unknown
    is_certain: bool = True  # the bad value originated at this place, and was not only noticed there
    is_late: bool = False  # the training code has continued since the check
    ends: tuple[float, float] | tuple[()] = ()  # smallest and largest element, if they came from a device
    at: int | None = None  # how many calls had returned before this one; None for all
    details: Details = field(default_factory=Details)
    own_since: int = 0  # as `since`, for the module's own parameters
    optimizer: int = 0  # number of the optimizer that holds the parameters, 0 for one that has never stepped
    is_first_step: bool = False  # that optimizer makes its first step now
    may_write: bool = False  # the call may itself have written the module's buffers
    bad: tuple[int, ...] = ()  # positions of the bad tensors among those checked, if their values came from a device
    own: tuple[list[str], ...] = ()  # names of the module's parameters, and of its buffers, if on a device
    unread: tuple[int, ...] = ()  # positions in `Entry.results` of what could not be read, while the rest was good

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


class CheckedSteps:
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


class Judge:
    """Finds the origin in a sequence of events, given in the order of execution.

    Each method that judges returns the event of the origin, with the `where` and `module` to report, or None.
    Optimizers are identified by numbers (`Event.optimizer`).

    Attributes:
        patience: how many skipped steps in a row are reported.
        pending: by thread: a call with bad inputs; its caller decides when it returns.
        suspects: by optimizer: its bad gradients, until their fate is known.
        settled: optimizers whose bad gradients have a known fate; the gradients may stay in memory for a while.
        skipped: number of steps in which bad gradients were discarded.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.pending: dict[int, Event] = {}
        self.suspects: dict[int, Event] = {}
        self.settled: set[int] = set()
        self.skipped = 0
        self._in_a_row: dict[int, int] = {}  # by optimizer: such steps in a row
        self._first: Event | None = (
            None  # the first bad gradient in a backward since gradients were last known to be good
        )

    @property
    def is_suspicious(self) -> bool:
        """Whether there is a bad gradient whose fate is unknown."""
        return self._first is not None or bool(self.suspects)

    @property
    def is_calm(self) -> bool:
        """Whether no bad gradient is remembered, so that good gradients change nothing."""
        return not (self.is_suspicious or self.settled or self._in_a_row)

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
        if event.kind and (self._first is None or event.order < self._first.order):
            self._first = event

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
        if not self.suspects and self._first is not None and is_clear:
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
        first, suspect = self._first, self.suspects.pop(event.optimizer, None)
        for optimizer in (event.optimizer, 0) if event.is_first_step else (event.optimizer,):
            self._in_a_row.pop(optimizer, None)
        if event.kind or not self.suspects:
            self._first = None
        origin = first or suspect
        return (origin if origin is not None and origin.module else event) if event.kind else None

    def _skip(self, optimizer: int, suspect: Event | None = None) -> Event | None:
        suspect = self.suspects.pop(optimizer, suspect)
        origin = self._first or suspect
        if not self.suspects:
            self._first = None
        self.skipped += 1
        self._in_a_row[optimizer] = self._in_a_row.get(optimizer, 0) + 1
        return origin if self._in_a_row[optimizer] >= self.patience else None
