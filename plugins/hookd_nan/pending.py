"""What cannot be judged yet, because its numbers are on a device: judged in order, when they have come.

Runs in the target.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
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
    """Of a tensor: its place among those that were looked at, its smallest and its largest element."""

LARGEST = 1024
"""How many events are asked for together;"""
MOST = 64
"""and how many such batches may be under way: a model that is called without ever a step must not fill the memory."""


@dataclass
class Entry:
    """An event whose kind may not be known yet, and the function that is to judge it.

    `found` is what was found in the event's own tensors, in its inputs, and in the module's own parameters and buffers.
    """

    judge_with: Callable[[Event], None]
    event: Event
    found: tuple[Found, ...]
    masks: bool = False

    @property
    def values(self) -> list[Tensor]:
        """What must be read from a device before the event can be judged."""
        values: list[Tensor] = []
        for one in (one for found in self.found if isinstance(found, list) for one in found):
            if isinstance(one, Range):
                values += one.low, one.high
            elif not isinstance(one.value, float):  # which is nothing to wait for
                values.append(one.value)
        return values

    @property
    def is_known(self) -> bool:
        """Whether nothing is on a device."""
        return all(isinstance(found, str) for found in self.found)

    def judge(self, values: Iterator[float]) -> None:
        """Judge the event; `values` goes on with the numbers of its `values`."""
        read = [found if isinstance(found, str) else list(_read(found, values)) for found in self.found]
        if not isinstance(read[0], str):
            self.event.ends = read[0][0][1:]
        bad = [() if isinstance(one, str) else self._bad(one) for one in read]
        kinds = [one if isinstance(one, str) else self._worst(one) for one in read]
        self.event.kind, self.event.bad = kinds[0], bad[0]
        self.event.inputs = kinds[1] if len(kinds) > 1 else ""
        if kinds[0] and len(kinds) > 2:
            self.event.blame_own(*kinds[2:])
            self.event.name_own(*bad[2:])
        self.judge_with(self.event)

    def _worst(self, read: list[_Numbers]) -> str:
        return max(kind_of(low, high, masks=self.masks) for _, low, high in read)

    def _bad(self, read: list[_Numbers]) -> tuple[int, ...]:
        return tuple(at for at, low, high in read if kind_of(low, high, masks=self.masks))


def _read(found: list[Range | Largest], values: Iterator[float]) -> Iterator[_Numbers]:
    """Give the place and the ends of each tensor, by the numbers that have come for them."""
    for one in found:
        if isinstance(one, Range):
            yield one.at, next(values), next(values)
        else:
            for at in one.at:
                largest = next(values)
                yield at, largest, largest


@dataclass
class Batch:
    """The events of one step; `numbers` has those of their `values`, in order, as far as they have come."""

    entries: list[Entry]
    numbers: list[float]
    missing: int = 0

    def judge(self) -> None:
        """Judge all of them."""
        values = iter(self.numbers)
        for entry in self.entries:
            entry.event.is_late = True
            entry.judge(values)


@dataclass
class Queue:
    """Has events judged in the order in which they came: at once, or when what is before them has been read."""

    context: Context
    entries: list[Entry] = field(default_factory=list)
    batches: deque[Batch] = field(default_factory=deque)

    def is_known(self, *found: Found) -> bool:
        """Whether an event would be judged at once."""
        return not (self.entries or self.batches) and all(isinstance(one, str) for one in found)

    def submit(self, judge: Callable[[Event], None], event: Event, *found: Found, masks: bool = False) -> None:
        """Have an event judged: at once if all is known and nothing before it is waiting."""
        entry = Entry(judge, event, found, masks)
        if self.entries or self.batches or not entry.is_known:
            self.entries.append(entry)
            if len(self.entries) >= LARGEST:
                self.flush()
        else:
            entry.judge(iter(()))

    def succeed(self, predecessor: Queue) -> None:
        """Take over what waits in another one; what that has asked for would never arrive, and is asked for again."""
        waiting = [entry for batch in predecessor.batches for entry in batch.entries]
        self.entries = waiting + predecessor.entries
        predecessor.batches.clear()
        predecessor.entries = []

    def flush(self) -> None:
        """Ask for the numbers of what was submitted; at the end of a step."""
        if not self.entries:
            return
        asked = [value for entry in self.entries for value in entry.values]
        sizes = [value.numel() for value in asked]
        batch = Batch(self.entries, [0.0] * sum(sizes))
        self.entries = []
        self.batches.append(batch)
        if len(self.batches) > MOST:
            self.batches.popleft()
        devices: dict[torch.device, list[int]] = {}
        for at, value in enumerate(asked):
            devices.setdefault(value.device, []).append(at)
        batch.missing = len(devices)
        begins = list(accumulate(sizes, initial=0))
        for numbers in devices.values():
            places = [place for at in numbers for place in range(begins[at], begins[at + 1])]
            self._ask(batch, places, [asked[at] for at in numbers])
        self._judge_complete()

    def _ask(self, batch: Batch, places: list[int], values: list[Tensor]) -> None:
        def arrived(numbers: list[float]) -> None:
            for at, number in zip(places, numbers):
                batch.numbers[at] = number
            batch.missing -= 1
            self._judge_complete()

        self.context.later(values, arrived)

    def _judge_complete(self) -> None:
        while self.batches and not self.batches[0].missing:
            self.batches.popleft().judge()
