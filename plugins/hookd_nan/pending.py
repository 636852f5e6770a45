"""What cannot be judged yet, because its numbers are on a device: judged in order, when they have come.

Runs in the target.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Callable

from hookd_nan.scan import kind_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import Tensor

    from hookd import Context
    from hookd_nan.judge import Event
    from hookd_nan.scan import Found, Range

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
    def ranges(self) -> list[Range]:
        """What must be read from a device before the event can be judged."""
        return [one for found in self.found if isinstance(found, list) for one in found]

    @property
    def is_known(self) -> bool:
        """Whether nothing is on a device."""
        return all(isinstance(found, str) for found in self.found)

    def judge(self, values: Iterator[float]) -> None:
        """Judge the event; `values` goes on with the minima and maxima of its ranges."""
        read = [f if isinstance(f, str) else [(next(values), next(values)) for _ in f] for f in self.found]
        if not isinstance(read[0], str):
            self.event.ends = read[0][0]
        kinds = [one if isinstance(one, str) else self._worst(one) for one in read]
        self.event.kind = kinds[0]
        self.event.inputs = kinds[1] if len(kinds) > 1 else ""
        if kinds[0] and len(kinds) > 2:
            self.event.blame_own(*kinds[2:])
        self.judge_with(self.event)

    def _worst(self, ends: list[tuple[float, float]]) -> str:
        return max(kind_of(low, high, masks=self.masks) for low, high in ends)


@dataclass
class Batch:
    """The events of one step; `numbers` has the ends of their ranges, in order, as far as they have come."""

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
        ends = [end for entry in self.entries for pair in entry.ranges for end in pair]
        batch = Batch(self.entries, [0.0] * len(ends))
        self.entries = []
        self.batches.append(batch)
        if len(self.batches) > MOST:
            self.batches.popleft()
        devices: dict[torch.device, list[int]] = {}
        for at, end in enumerate(ends):
            devices.setdefault(end.device, []).append(at)
        batch.missing = len(devices)
        for places in devices.values():
            self._ask(batch, places, [ends[at] for at in places])
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
