"""Queue events whose values are still on a device, and judge them in order when the values arrive."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from typing import TYPE_CHECKING, Callable, NamedTuple

from hookd_nan.scan import kind_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import Tensor

    from hookd import Context
    from hookd_nan.judge import Event
    from hookd_nan.scan import Result

LARGEST = 1024
"""Largest number of events whose values are requested together."""
CALLS = 32
"""Number of a model's calls without a step after which the values are requested: a server makes no steps."""
PARTS = {
    "output": ("its outputs", "its inputs", "its parameters", "its buffers"),
    "grad": ("its gradients", "the gradients that reached it"),
}
"""What the results of `Entry.results` belong to, by the kind of place."""


class Reading(NamedTuple):
    """The result of a check after its values have been read.

    Attributes:
        kind: "" for good values, else "inf" or "nan".
        bad: positions of the bad tensors, if their values came from a device.
        ends: smallest and largest element of the first tensor, if they came from a device.
        is_unread: nothing is known to be bad, but not all values could be read.
    """

    kind: str
    bad: tuple[int, ...] = ()
    ends: tuple[float, float] | tuple[()] = ()
    is_unread: bool = False


class Piece(NamedTuple):
    """A value of an event in a request; its numbers belong into `entry.numbers` from `begin` on."""

    entry: Entry
    begin: int
    value: Tensor


@dataclass(eq=False)
class Entry:
    """An event whose kind may not be known yet.

    Attributes:
        judge_with: the function that judges it.
        event: the event.
        results: results for the event's own tensors, for its inputs, and for the module's own parameters and buffers.
        masks: `-inf` alone is good.
        numbers: those of its values on devices; None for those that have not arrived.
        last: number of the last request for its values; infinity while requests are being made.
    """

    judge_with: Callable[[Event], None]
    event: Event
    results: tuple[Result, ...]
    masks: bool = False
    numbers: list[float | None] = field(default_factory=list)
    last: float = 0

    def pieces(self) -> list[Piece]:
        """Return the values that must be read from devices before the event can be judged."""
        pieces = []
        self.numbers = []
        for value in (x for result in self.results if isinstance(result, list) for ends in result for x in ends.values):
            pieces.append(Piece(self, len(self.numbers), value))
            self.numbers += [None] * value.numel()
        return pieces

    def judge(self, *, is_late: bool) -> Event:
        """Judge the event, and return it; `is_late`: the training code has continued since the check."""
        numbers = iter(self.numbers)
        readings = [self._read(result, numbers) for result in self.results]
        own, inputs, *of_module = *readings, *[Reading("")] * (4 - len(readings))
        unread = tuple(at for at, reading in enumerate(readings) if reading.is_unread)
        event = replace(
            self.event, kind=own.kind, bad=own.bad, inputs=inputs.kind, ends=own.ends, is_late=is_late, unread=unread
        )
        if own.kind:
            event = _with_own_blamed(event, *of_module)
        if unread and event.where in PARTS:
            event = event.having(unread=[PARTS[event.where][at] for at in unread])
        self.judge_with(event)
        return event

    def _read(self, result: Result, numbers: Iterator[float | None]) -> Reading:
        if isinstance(result, str):
            return Reading(result)
        ranges = [tensor_range for ends in result for tensor_range in ends.read(numbers)]
        known = [(at, low, high) for at, low, high in ranges if low is not None and high is not None]
        kinds = {at: kind for at, low, high in known if (kind := kind_of(low, high, masks=self.masks))}
        ends = known[0][1:] if known else ()
        # What is bad is known to be, even if other numbers are not known.
        return Reading(max(kinds.values(), default=""), tuple(kinds), ends, not kinds and len(known) < len(ranges))


def _with_own_blamed(event: Event, parameters: Reading, buffers: Reading) -> Event:
    """Return the event of a bad output with one of the module's own tensors blamed, if one is bad.

    Buffers are blamed last: an infinity in them may be a legitimate value ("best loss so far").
    """
    is_buffer = not parameters.kind
    if is_buffer and (not buffers.kind or event.inputs or event.may_write):
        return event
    blamed = buffers if is_buffer else parameters
    event = replace(event, where="param", kind=blamed.kind, since=event.own_since).without("inputs", "neginf_in")
    if blamed.bad:
        event = event.having(parameter=event.own[is_buffer][blamed.bad[0]])
        event = event.having(is_buffer=True) if is_buffer else event
    return event


@dataclass
class Queue:
    """Judges events in the order in which they came: at once, or when the values of all earlier ones are known.

    Attributes:
        unread: called with an event that could not be judged, because its numbers could not be read.
        entries: the events whose values have not been requested.
        requested: the earlier ones, whose values have not all arrived.
        requests: number of the last request; they are answered in their order.
        answered: number of the last request that was answered. An earlier one without an answer met a quarantine of the
            plugin, and gets none.
        calls: calls of models since the last request.
    """

    context: Context
    unread: Callable[[Event], None]
    entries: list[Entry] = field(default_factory=list)
    requested: deque[Entry] = field(default_factory=deque)
    requests: int = 0
    answered: int = 0
    calls: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether no event waits, so that one whose values are known is judged at once."""
        return not (self.entries or self.requested)

    def submit(self, judge: Callable[[Event], None], event: Event, *results: Result, masks: bool = False) -> None:
        """Judge an event at once if all is known and no earlier one waits; else queue it."""
        entry = Entry(judge, event, results, masks)
        if self.is_empty and all(isinstance(result, str) for result in results):
            entry.judge(is_late=False)
            return
        self.entries.append(entry)
        if len(self.entries) >= LARGEST:
            self.flush()

    def succeed(self, predecessor: Queue) -> None:
        """Take over the events of a predecessor. Its requests get no answers, so the values are requested again."""
        self.entries = [*predecessor.requested, *predecessor.entries]
        for entry in self.entries:
            entry.last = 0  # a number of the predecessor's
        predecessor.requested.clear()
        predecessor.entries = []

    def call_done(self) -> None:
        """Request the values of the queued events after some calls of models, in code that makes no steps."""
        self.calls += 1
        # Between a backward and its optimizer, the start of the next backward must find the gradients among the entries.
        if self.calls >= CALLS and not any(entry.event.where == "grad" for entry in self.entries):
            self.flush()

    def flush(self) -> None:
        """Request the values of the queued events, at the end of a step."""
        self.calls = 0
        if self.is_empty:
            return
        entries, self.entries = self.entries, []
        by_device: dict[torch.device, list[Piece]] = {}
        for piece in (piece for entry in entries for piece in entry.pieces()):
            by_device.setdefault(piece.value.device, []).append(piece)
        self.requested += entries
        self._request(list(by_device.values()))
        self._judge_complete()

    def _request(self, requests: list[list[Piece]]) -> None:
        entries = [piece.entry for pieces in requests for piece in pieces if piece.entry.last < math.inf]
        for entry in entries:
            entry.last = math.inf
        try:
            for pieces in requests:
                self._request_one(pieces)
        finally:  # even if it fails, no later event must wait for these
            for entry in entries:
                entry.last = self.requests

    def _request_one(self, pieces: list[Piece]) -> None:
        self.requests += 1
        number = self.requests

        def arrived(numbers: list[float]) -> None:
            left = iter(numbers)
            for entry, begin, value in pieces:
                size = value.numel()
                entry.numbers[begin : begin + size] = islice(left, size)
            self._answered(number)

        def lost() -> None:
            # One value cannot be read, or there is no memory for all of them: each event is requested by itself, then each value.
            parts = [list(own) for _, own in groupby(pieces, lambda piece: id(piece.entry))]
            if len(parts) == 1:
                parts = [[piece] for piece in pieces]
            if len(parts) > 1:
                self._request(parts)
            self._answered(number)

        self.context.later([piece.value for piece in pieces], arrived, lost)

    def _answered(self, number: int) -> None:
        self.answered = max(self.answered, number)
        self._judge_complete()

    def _judge_complete(self) -> None:
        while self.requested and self.requested[0].last <= self.answered:
            event = self.requested.popleft().judge(is_late=True)
            if event.is_unread:
                self.unread(event)
