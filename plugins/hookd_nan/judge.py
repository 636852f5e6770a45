"""Where the first one was born: a judgement on events in the order of execution. No tensor from here on.

Runs in the target.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hookd_nan.capture import Call


@dataclass
class Event:
    """What was seen at one place; `kind` and `inputs` are "", "inf" or "nan".

    `order` counts up with the events; of a module's gradient, `inputs` is that of its output, and `reached` the order
    in which that arrived. `since` is the first step in which it may have been born, 0 if nobody knows; `is_certain`
    says that it was born at this place, and was not only noticed there. `is_late`: it is judged when the training code
    has gone on. `ends`: smallest and largest element, where they came from a device. `at`: how many calls had returned
    before it. `call`: the one that it was seen in, for a bundle, where a person has asked for one and all is known at
    once. `own_since`: what `since` is for one of the module's own parameters. `may_write`: the call may itself have
    written what is in the module's buffers.
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
    details: dict[str, Any] = field(default_factory=dict)
    call: Call | None = None
    own_since: int = 0
    may_write: bool = False

    def blame_own(self, parameters: str, buffers: str) -> None:
        """Put the module's own tensors to blame for its bad output, given what is in them.

        A buffer is the last to be blamed: an infinity may be its proper value ("best loss so far").
        """
        if parameters or (buffers and not self.inputs and not self.may_write):
            self.where, self.kind, self.since = "param", parameters or buffers, self.own_since


class Looks:
    """The last two steps in which something was looked at; 0 for none."""

    def __init__(self) -> None:
        self.before = self.latest = 0

    def note(self, step: int) -> None:
        """It is looked at in this step."""
        if step != self.latest:
            self.before, self.latest = self.latest, step

    def since(self, step: int) -> int:
        """Give the first step in which what is found in `step` may have been there without being seen; 0: unknown."""
        last = self.last(step)
        return last + 1 if last else 0

    def last(self, step: int) -> int:
        """Give the step before `step` in which it was looked at last; 0: unknown."""
        return self.before if self.latest == step else self.latest


class Judge:
    """Finds the origin in a sequence of events, which it is given in the order of execution.

    Each method returns the event that is the origin, with `where` and `module` as they are to be reported, or None.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.pending: dict[int, Event] = {}  # per thread: a call with bad inputs, whose caller is to decide
        self.suspect: Event | None = None  # the first bad gradient since gradients were last known to be good
        self.skipped = 0
        self.in_a_row = 0

    def call(self, event: Event) -> Event | None:
        """Judge a module call that has returned; `where` is "output", or "param" where one of its own is bad."""
        waiting = self.pending.get(event.thread)
        if waiting is not None and len(event.stack) < len(waiting.stack):
            del self.pending[event.thread]
            if not event.inputs and not event.kind:
                # Made between the two calls, and taken away again before the outer one returned.
                return replace(waiting, where="input", details={})
            event.kind = event.kind or waiting.kind
        if not event.kind:
            return None
        if event.where == "param" or not event.inputs:
            return event
        if len(event.stack) <= 1:
            return replace(event, where="input", kind=event.inputs, details={})
        self.pending[event.thread] = event
        return None

    def root(self, event: Event) -> Event | None:
        """Judge the call of a root whose modules were not looked at."""
        if event.kind and event.inputs:
            return replace(event, where="input", kind=event.inputs, is_certain=True, details={})
        return event if event.kind else None

    def gradient(self, event: Event) -> None:
        """Keep the first bad gradient until it is known what becomes of it."""
        if event.kind and (self.suspect is None or event.order < self.suspect.order):
            self.suspect = event

    def loss(self, event: Event, *, cleared: bool) -> Event | None:
        """Judge the start of a backward; `cleared`: no bad gradient of an earlier one is left."""
        origin = self._skip() if self.suspect is not None and cleared else None
        return origin or (event if event.kind else None)

    def step(self, event: Event, *, found_inf: bool) -> Event | None:
        """Judge the gradients that an optimizer is about to use or, with `found_inf`, to throw away."""
        if found_inf:
            self.gradient(event)
            return self._skip()
        suspect, self.suspect, self.in_a_row = self.suspect, None, 0
        if not event.kind:
            return None
        return suspect if suspect is not None and suspect.module else event

    def _skip(self) -> Event | None:
        suspect, self.suspect = self.suspect, None
        self.skipped += 1
        self.in_a_row += 1
        return suspect if self.in_a_row >= self.patience else None
