"""What cannot be judged yet, because its numbers are on a device: kept in order, read without waiting for the device.

Runs in the target.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable

import torch
from torch import Tensor

from hookd_nan.tensors import kind_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookd_nan.judge import Event
    from hookd_nan.scan import Found, Range

QUEUE_LIMIT = 1024


class Queue:
    """Has events judged in the order in which they came: at once, or when what is before them has been read."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._later = Later()

    def __bool__(self) -> bool:
        return bool(self._entries)

    def submit(self, judge: Callable[[Event], None], event: Event, *found: Found) -> None:
        """Have an event judged: at once if all is known and nothing before it is waiting."""
        entry = Entry(judge, event, found)
        if self._entries or self._later.waiting or not entry.is_known:
            self._entries.append(entry)
            if len(self._entries) >= QUEUE_LIMIT:
                self.flush()
        else:
            entry.judge(iter(()))

    def flush(self) -> None:
        """Send what is on a device on its way, and have what has arrived judged; at the end of a step."""
        if self._entries:
            self._later.put([end for e in self._entries for pair in e.ranges for end in pair], self._entries)
            self._entries = []
        for numbers, entries in self._later.take():
            values = iter(numbers)
            for entry in entries:
                entry.event.is_late = True
                entry.judge(values)


@dataclass
class Entry:
    """An event whose kind may not be known yet, and the function that is to judge it.

    `found` is what was found in the event's own tensors, in its inputs and in the module's own parameters.
    """

    judge_with: Callable[[Event], None]
    event: Event
    found: tuple[Found, ...]

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
        kinds = [
            found if isinstance(found, str) else max(kind_of(next(values), next(values)) for _ in found)
            for found in self.found
        ]
        self.event.kind = kinds[0]
        self.event.inputs = kinds[1] if len(kinds) > 1 else ""
        if kinds[0] and len(kinds) > 2 and kinds[2]:
            self.event.where = "param"
        self.judge_with(self.event)


class Later:
    """Reads 0-dim tensors of a device without waiting for it: they are asked for now, and taken when they are there."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[Tensor, Any, Any]] = deque()

    def put(self, values: list[Tensor], note: Any) -> None:
        """Send `values`, which may lie on several devices, on their way; `note` comes back with them."""
        if not values:
            self.waiting.append((torch.empty(0), None, note))
            return
        stacked = torch.stack([v.to(values[0].device, torch.float32, non_blocking=True) for v in values])
        if not stacked.is_cuda:
            self.waiting.append((stacked, None, note))
            return
        with torch.cuda.device(stacked.device):
            host = torch.empty(stacked.shape, pin_memory=True).copy_(stacked, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self.waiting.append((host, event, note))

    def take(self) -> Iterator[tuple[list[float], Any]]:
        """Give what has arrived, in the order in which it was asked for; the newest stays until the next time."""
        while len(self.waiting) > 1 and (self.waiting[0][1] is None or self.waiting[0][1].query()):
            host, _, note = self.waiting.popleft()
            yield host.tolist(), note
