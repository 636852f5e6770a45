"""Small tensors of a device, read a step later without waiting for the device. Runs in the target.

What all plugins ask for in one step travels together: one copy and one event for each device, sent at the end of the
step and looked at from the end of the next one on.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hookd.agent import quiet

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from hookd.context import Context

LIMIT = 1024
"""How many requests are sent before the step's end: code that makes no steps must not fill the memory."""


class _Asked(NamedTuple):
    context: Context
    values: Sequence[Tensor]
    then: Callable[[list[float]], None]
    stream: Any


class _Sent(NamedTuple):
    asked: list[_Asked]
    host: Tensor
    event: Any


class Later:
    """Numbers that are on their way.

    Args:
        deliver: calls a plugin back; gets its context, the function and the numbers, and raises nothing of a plugin's.
    """

    def __init__(self, deliver: Callable[[Context, Callable[[list[float]], None], list[float]], None]) -> None:
        self._deliver = deliver
        self._asked: deque[_Asked] = deque()
        self._sent: deque[_Sent] = deque()

    def ask(self, context: Context, values: Sequence[Tensor], then: Callable[[list[float]], None]) -> None:
        """Have `then` called with the elements of `values`, all in one list; any thread may ask."""
        if not values:
            return
        device = values[0].device
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._asked.append(_Asked(context, values, then, stream))
        if len(self._asked) >= LIMIT:
            self._send()

    def turn(self) -> None:
        """End a step: deliver what has arrived, and send what was asked for meanwhile."""
        if not (self._asked or self._sent):
            return
        was, undo = quiet.is_grad_enabled(), None
        try:
            quiet.set_grad_enabled(False)
            undo = quiet.enter()
            if undo is not None:
                self._take()
                self._send()
        finally:
            quiet.set_grad_enabled(was)
            if undo:
                quiet.leave(undo)

    def clear(self) -> None:
        """Forget all of it."""
        self._asked.clear()
        self._sent.clear()

    def _send(self) -> None:
        places: dict[tuple[torch.device, Any], list[_Asked]] = {}
        for _ in range(len(self._asked)):  # what other threads add meanwhile stays for the next time
            one = self._asked.popleft()
            places.setdefault((one.values[0].device, one.stream), []).append(one)
        for (device, stream), asked in places.items():
            if device.type == "cpu":
                self._hand_out(asked, _joined(asked, device).tolist())
            elif stream is not None:
                self._sent.append(_copied(asked, device, stream))
            else:  # no event that all of these devices have: by the next step it will be there
                self._sent.append(_Sent(asked, _joined(asked, device), None))

    def _take(self) -> None:
        """Hand out what has arrived, in the order in which it was asked for."""
        for _ in range(len(self._sent)):
            event = self._sent[0].event
            if event is not None and not event.query():
                return
            sent = self._sent.popleft()
            self._hand_out(sent.asked, sent.host.tolist())

    def _hand_out(self, asked: list[_Asked], numbers: list[float]) -> None:
        at = 0
        for one in asked:
            size = sum(value.numel() for value in one.values)
            self._deliver(one.context, one.then, numbers[at : at + size])
            at += size


def _joined(asked: list[_Asked], device: torch.device) -> Tensor:
    wide = torch.float32 if device.type == "mps" else torch.float64  # Apple's GPUs have no float64
    values = [value for one in asked for value in one.values]
    return torch.cat([value.detach().reshape(-1).to(device, wide, non_blocking=True) for value in values])


def _copied(asked: list[_Asked], device: torch.device, stream: Any) -> _Sent:
    """Copy on the stream that the values were made on, so that no stream has to wait for another."""
    with torch.cuda.stream(stream):
        joined = _joined(asked, device)
        host = torch.empty(joined.shape, dtype=joined.dtype, pin_memory=True).copy_(joined, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
    return _Sent(asked, host, event)
