"""Where the first one was born: a judgement on events in the order of execution. No tensor from here on.

Runs in the target.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection

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
    written what is in the module's buffers. `bad`: which of the tensors looked at are, by their places, where their numbers
    came from a device; `own`: the names of the module's own parameters and buffers, likewise. `optimizer`: the number of the one that holds the parameters, 0 for one that
    has never stepped; `is_first_step`: it does so now.
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
    optimizer: int = 0
    is_first_step: bool = False
    may_write: bool = False
    bad: tuple[int, ...] = ()
    own: tuple[list[str], ...] = ()

    def blame_own(self, parameters: str, buffers: str) -> None:
        """Put the module's own tensors to blame for its bad output, given what is in them.

        A buffer is the last to be blamed: an infinity may be its proper value ("best loss so far").
        """
        if parameters or (buffers and not self.inputs and not self.may_write):
            self.where, self.kind, self.since = "param", parameters or buffers, self.own_since
            for why_not in ("inputs", "neginf_in"):
                self.details.pop(why_not, None)

    def name_own(self, parameters: tuple[int, ...], buffers: tuple[int, ...]) -> None:
        """Name the one that is to blame, by the places of the bad ones."""
        for names, bad in zip(self.own, (parameters, buffers)):
            if self.where == "param" and bad:
                self.details = {**self.details, "parameter": names[bad[0]]}
                return


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
    Optimizers are known by a number, see `Event.optimizer`.

    Attributes:
        pending: per thread: a call with bad inputs, whose caller is to decide.
        suspects: per optimizer: its bad gradients, until it is known what becomes of them.
        settled: optimizers of whose bad gradients it is known what became; they may lie there a while.
        skipped: steps in which bad gradients were thrown away.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.pending: dict[int, Event] = {}
        self.suspects: dict[int, Event] = {}
        self.settled: set[int] = set()
        self.skipped = 0
        self._first: Event | None = (
            None  # the first bad gradient that flowed since gradients were last known to be good
        )
        self._in_a_row: dict[int, int] = {}

    @property
    def is_suspicious(self) -> bool:
        """Whether there is a bad gradient of which nobody knows what becomes of it."""
        return self._first is not None or bool(self.suspects)

    @property
    def is_calm(self) -> bool:
        """Whether nothing bad is remembered of any gradient, so that good ones have nothing to say."""
        return not (self.is_suspicious or self.settled or self._in_a_row)

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

    def flow(self, event: Event) -> None:
        """Keep the first bad gradient that flows, until it is known what becomes of it."""
        if event.kind and (self._first is None or event.order < self._first.order):
            self._first = event

    def gradients(self, event: Event) -> None:
        """Keep the bad gradients of an optimizer's parameters after a backward, until it is known what becomes of them."""
        if event.kind and event.optimizer not in self.settled:
            self.suspects.setdefault(event.optimizer, event)

    def loss(self, event: Event, *, cleared: Collection[int], is_clear: bool) -> Event | None:
        """Judge the start of a backward.

        Args:
            event: of what it starts from.
            cleared: the optimizers of which no bad gradient of an earlier backward is left.
            is_clear: none is left of any.
        """
        origin = None
        self.settled.difference_update(cleared)
        if not self.suspects and self._first is not None and is_clear:
            return self._skip(0) or (event if event.kind else None)
        for optimizer in [one for one in self.suspects if one in cleared]:
            origin = origin or self._skip(optimizer)
        return origin or (event if event.kind else None)

    def step(self, event: Event, *, found_inf: bool) -> Event | None:
        """Judge the gradients that an optimizer is about to use or, with `found_inf`, to throw away."""
        if event.is_first_step and (event.kind or found_inf):
            unknown = self.suspects.pop(0, None)  # as which it was known after the backward
            self.suspects.update({} if unknown is None else {event.optimizer: unknown})
        (self.settled.add if event.kind or found_inf else self.settled.discard)(event.optimizer)
        if found_inf:
            return self._skip(event.optimizer, event)
        first, suspect = self._first, self.suspects.pop(event.optimizer, None)
        for optimizer in (event.optimizer, 0) if event.is_first_step else (event.optimizer,):
            self._in_a_row.pop(optimizer, None)
        if event.kind or not self.suspects:
            self._first = None
        found = first or suspect
        return (found if found is not None and found.module else event) if event.kind else None

    def _skip(self, optimizer: int, suspect: Event | None = None) -> Event | None:
        suspect = self.suspects.pop(optimizer, suspect)
        found = self._first or suspect
        if not self.suspects:
            self._first = None
        self.skipped += 1
        self._in_a_row[optimizer] = self._in_a_row.get(optimizer, 0) + 1
        return found if self._in_a_row[optimizer] >= self.patience else None
