"""Queue events whose values are still on a device, and judge them in order when the values arrive."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Callable

from hookd_nan.scan import Range, kind_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import Tensor

    from hookd import Context, Largest
    from hookd_nan.judge import Event
    from hookd_nan.scan import Found

    _Numbers = tuple[int, float | None, float | None]
    """A tensor's position among those checked, its smallest and its largest element; None if they could not be read."""

LARGEST = 1024
"""Largest number of events whose values are requested together."""
CALLS = 32
"""Number of a model's calls without a step after which the values are requested: a server makes no steps."""
PARTS = ("its outputs", "its inputs", "its parameters", "its buffers")
GRADIENTS = ("its gradients", "the gradients that reached it")
"""What the results of `Entry.found` belong to."""


@dataclass
class Entry:
    """An event whose kind may not be known yet.

    Attributes:
        judge_with: the function that judges it.
        event: the event.
        found: results for the event's own tensors, for its inputs, and for the module's own parameters and buffers.
        masks: `-inf` alone is good.
    """

    judge_with: Callable[[Event], None]
    event: Event
    found: tuple[Found, ...]
    masks: bool = False

    @property
    def values(self) -> list[Tensor]:
        """The values that must be read from a device before the event can be judged."""
        values: list[Tensor] = []
        for result in (result for found in self.found if isinstance(found, list) for result in found):
            if isinstance(result, Range):
                values += result.low, result.high
            elif not isinstance(result.value, float):  # a float is known already
                values.append(result.value)
        return values

    @property
    def is_known(self) -> bool:
        """Whether no value is on a device."""
        return all(isinstance(found, str) for found in self.found)

    def judge(self, values: Iterator[float | None], *, is_late: bool) -> Event:
        """Judge the event, and return it.

        Args:
            values: an iterator whose next numbers are those of `self.values`, in order; None for one that could not be read.
            is_late: the training code has continued since the check.
        """
        read = [found if isinstance(found, str) else list(_read(found, values)) for found in self.found]
        ends: tuple[float, float] | tuple[()] = ()
        if not isinstance(read[0], str):
            ends = next(((low, high) for _, low, high in _known(read[0])), ())
        bad = [() if isinstance(result, str) else self._bad(result) for result in read]
        kinds = [result if isinstance(result, str) else self._worst(result) for result in read]
        # What is bad is known to be, even if other numbers are not known.
        unread = tuple(at for at, result in enumerate(read) if not kinds[at] and _has_gaps(result))
        inputs = kinds[1] if len(kinds) > 1 else ""
        event = replace(self.event, kind=kinds[0], bad=bad[0], inputs=inputs, ends=ends, is_late=is_late, unread=unread)
        if kinds[0] and len(kinds) > 2:
            event = event.blamed_own(*kinds[2:]).named_own(*bad[2:])
        if unread and event.where in ("output", "grad"):
            parts = PARTS if event.where == "output" else GRADIENTS
            event = event.having(unread=[parts[at] for at in unread])
        self.judge_with(event)
        return event

    def _worst(self, read: list[_Numbers]) -> str:
        return max((kind_of(low, high, masks=self.masks) for _, low, high in _known(read)), default="")

    def _bad(self, read: list[_Numbers]) -> tuple[int, ...]:
        return tuple(at for at, low, high in _known(read) if kind_of(low, high, masks=self.masks))


def _read(found: list[Range | Largest], values: Iterator[float | None]) -> Iterator[_Numbers]:
    """Yield the position and the range of each tensor, from the numbers that have arrived."""
    for result in found:
        if isinstance(result, Range):
            yield result.at, next(values), next(values)
        else:
            for at in result.at:
                largest = next(values)
                yield at, largest, largest


def _known(read: list[_Numbers]) -> Iterator[tuple[int, float, float]]:
    """Yield the ranges that could be read."""
    return ((at, low, high) for at, low, high in read if low is not None and high is not None)


def _has_gaps(read: str | list[_Numbers]) -> bool:
    """Whether some of the numbers could not be read."""
    return not isinstance(read, str) and any(low is None or high is None for _, low, high in read)


@dataclass
class Batch:
    """Events whose values were requested together.

    Attributes:
        entries: the events.
        numbers: the numbers of all their `values`, in order; None for those that have not arrived.
        missing: number of requests that have no answer yet.
        last: number of the last of these requests; None while one is being made.
    """

    entries: list[Entry]
    numbers: list[float | None]
    missing: int = 0
    last: int | None = None


@dataclass
class Piece:
    """A value of an event in a request, and where its numbers belong among those of the batch."""

    entry: int
    begin: int
    value: Tensor


@dataclass
class Queue:
    """Judges events in the order in which they came: at once, or when the values of all earlier ones are known.

    Attributes:
        unread: called with an event that could not be judged, because its numbers could not be read.
    """

    context: Context
    unread: Callable[[Event], None]
    entries: list[Entry] = field(default_factory=list)
    batches: deque[Batch] = field(default_factory=deque)
    requests: int = 0
    calls: int = 0

    def is_known(self, *found: Found) -> bool:
        """Whether an event would be judged at once."""
        return not (self.entries or self.batches) and all(isinstance(one, str) for one in found)

    def submit(self, judge: Callable[[Event], None], event: Event, *found: Found, masks: bool = False) -> None:
        """Judge an event at once if all is known and no earlier one waits; else queue it."""
        entry = Entry(judge, event, found, masks)
        if self.entries or self.batches or not entry.is_known:
            self.entries.append(entry)
            if len(self.entries) >= LARGEST:
                self.flush()
        else:
            entry.judge(iter(()), is_late=False)

    def succeed(self, predecessor: Queue) -> None:
        """Take over the events of a predecessor.

        The values that it has requested would never arrive, so they are requested again.
        """
        waiting = [entry for batch in predecessor.batches for entry in batch.entries]
        self.entries = waiting + predecessor.entries
        predecessor.batches.clear()
        predecessor.entries = []

    def call_done(self) -> None:
        """Request the values of the queued events after some calls of models, in code that makes no steps."""
        self.calls += 1
        # Between a backward and its optimizer, `Losses` must find the gradients among the entries.
        if self.calls >= CALLS and not any(entry.event.where == "grad" for entry in self.entries):
            self.flush()

    def flush(self) -> None:
        """Request the values of the queued events, at the end of a step."""
        self.calls = 0
        if not self.entries:
            return
        pieces: dict[torch.device, list[Piece]] = {}
        size = 0
        for at, entry in enumerate(self.entries):
            for value in entry.values:
                pieces.setdefault(value.device, []).append(Piece(at, size, value))
                size += value.numel()
        batch = Batch(self.entries, [None] * size)
        self.entries = []
        self.batches.append(batch)
        self._request(batch, list(pieces.values()))
        self._judge_complete()

    def _request(self, batch: Batch, requests: list[list[Piece]]) -> None:
        batch.missing += len(requests)
        batch.last = None
        try:
            for pieces in requests:
                self._request_one(batch, pieces)
        finally:  # even if it fails, no later batch must wait for this one
            batch.last = self.requests

    def _request_one(self, batch: Batch, pieces: list[Piece]) -> None:
        self.requests += 1
        number = self.requests

        def arrived(numbers: list[float]) -> None:
            left = iter(numbers)
            for piece in pieces:
                size = piece.value.numel()
                batch.numbers[piece.begin : piece.begin + size] = islice(left, size)
            self._answered(batch, number)

        def lost() -> None:
            # One value cannot be read, or there is no memory for all of them: each event is requested by itself, then each value.
            parts = [list(own) for _, own in groupby(pieces, attrgetter("entry"))]
            if len(parts) == 1:
                parts = [[piece] for piece in pieces]
            if len(parts) > 1:
                self._request(batch, parts)
            self._answered(batch, number)

        self.context.later([piece.value for piece in pieces], arrived, lost)

    def _answered(self, batch: Batch, number: int) -> None:
        batch.missing -= 1
        # Requests are answered in their order. An older one that still has no answer met a quarantine of the plugin, and gets none.
        for older in list(self.batches):
            if older.last is not None and older.last < number:
                older.missing = 0
        self._judge_complete()

    def _judge_complete(self) -> None:
        while self.batches and self.batches[0].missing <= 0:
            batch = self.batches.popleft()
            values = iter(batch.numbers)
            for entry in batch.entries:
                event = entry.judge(values, is_late=True)
                if event.is_unread:
                    self.unread(event)
