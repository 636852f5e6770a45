"""Queue events whose values are still on a device, and judge them in order when the values arrive."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Callable

from hookd_nan.scan import Range, kind_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import Tensor

    from hookd import Context, Largest
    from hookd_nan.judge import Event
    from hookd_nan.scan import Found

    _Numbers = tuple[int, float, float]
    """A tensor's position among those checked, its smallest and its largest element."""

LARGEST = 1024
"""Largest number of events whose values are requested together."""
MOST = 64
"""Largest number of batches in flight: a model that is called without ever a step must not fill the memory."""
# Numbers that cannot be read from a device never arrive, and all later batches wait for them. So the oldest batch is dropped,
# and its events are not judged: a bad value that only they have seen is not reported.


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

    def judge(self, values: Iterator[float], *, is_late: bool) -> None:
        """Judge the event.

        Args:
            values: an iterator whose next numbers are those of `self.values`, in order.
            is_late: the training code has continued since the check.
        """
        read = [found if isinstance(found, str) else list(_read(found, values)) for found in self.found]
        ends = () if isinstance(read[0], str) else read[0][0][1:]
        bad = [() if isinstance(result, str) else self._bad(result) for result in read]
        kinds = [result if isinstance(result, str) else self._worst(result) for result in read]
        inputs = kinds[1] if len(kinds) > 1 else ""
        event = replace(self.event, kind=kinds[0], bad=bad[0], inputs=inputs, ends=ends, is_late=is_late)
        if kinds[0] and len(kinds) > 2:
            event = event.blamed_own(*kinds[2:]).named_own(*bad[2:])
        self.judge_with(event)

    def _worst(self, read: list[_Numbers]) -> str:
        return max(kind_of(low, high, masks=self.masks) for _, low, high in read)

    def _bad(self, read: list[_Numbers]) -> tuple[int, ...]:
        return tuple(at for at, low, high in read if kind_of(low, high, masks=self.masks))


def _read(found: list[Range | Largest], values: Iterator[float]) -> Iterator[_Numbers]:
    """Yield the position and the range of each tensor, from the numbers that have arrived."""
    for result in found:
        if isinstance(result, Range):
            yield result.at, next(values), next(values)
        else:
            for at in result.at:
                largest = next(values)
                yield at, largest, largest


@dataclass
class Batch:
    """Events whose values were requested together.

    Attributes:
        entries: the events.
        numbers: the numbers of all their `values`, in order; 0 for those that have not arrived.
        missing: number of devices whose values have not arrived.
    """

    entries: list[Entry]
    numbers: list[float]
    missing: int = 0

    def judge(self) -> None:
        """Judge all events."""
        values = iter(self.numbers)
        for entry in self.entries:
            entry.judge(values, is_late=True)


@dataclass
class Queue:
    """Judges events in the order in which they came: at once, or when the values of all earlier ones are known."""

    context: Context
    entries: list[Entry] = field(default_factory=list)
    batches: deque[Batch] = field(default_factory=deque)

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

    def flush(self) -> None:
        """Request the values of the queued events, at the end of a step."""
        if not self.entries:
            return
        requested = [value for entry in self.entries for value in entry.values]
        sizes = [value.numel() for value in requested]
        batch = Batch(self.entries, [0.0] * sum(sizes))
        self.entries = []
        self.batches.append(batch)
        if len(self.batches) > MOST:
            self.batches.popleft()
        devices: dict[torch.device, list[int]] = {}
        for at, value in enumerate(requested):
            devices.setdefault(value.device, []).append(at)
        batch.missing = len(devices)
        begins = list(accumulate(sizes, initial=0))
        for numbers in devices.values():
            places = [place for at in numbers for place in range(begins[at], begins[at + 1])]
            self._request(batch, places, [requested[at] for at in numbers])
        self._judge_complete()

    def _request(self, batch: Batch, places: list[int], values: list[Tensor]) -> None:
        def arrived(numbers: list[float]) -> None:
            for at, number in zip(places, numbers):
                batch.numbers[at] = number
            batch.missing -= 1
            self._judge_complete()

        self.context.later(values, arrived)

    def _judge_complete(self) -> None:
        while self.batches and not self.batches[0].missing:
            self.batches.popleft().judge()
