"""Small tensors of a device, read a step later without waiting for the device. Runs in the target.

What all plugins ask for in one step travels together: one copy and one event for each device, sent at the end of the
step and looked at from the end of the next one on.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict, deque
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hookd.target.tensors import torch_state
from hookd.target.tensors.host_memory import PLAIN, is_readable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from hookd.api.context import Context

_dtype = attrgetter("dtype")
LIMIT = 1024
"""How many requests are sent before the step's end: code that makes no steps must not fill the memory."""


class _Asked(NamedTuple):
    context: Context
    values: Sequence[Tensor]
    then: Callable[[list[float]], None]
    stream: Any


class _Buffer(NamedTuple):
    """Page-locked memory of the host, and the event after the last copy to it."""

    host: Tensor
    event: Any


class _Copy(NamedTuple):
    """What is on its way to `host`; in a buffer, from a device that has them."""

    asked: list[_Asked]
    host: Tensor
    buffer: _Buffer | None = None

    def is_over(self) -> bool:
        return self.buffer is None or bool(self.buffer.event.query())


class Buffers:
    """What a CUDA device copies to, used again and again.

    Torch records an event where page-locked memory is freed (ATen/core/CachingHostAllocator.h, `free`). After an error of
    the device that raises, in a destructor: the process ends by SIGABRT, without a traceback. So none is freed in between,
    and at the end none where the device no longer answers.

    Args:
        make: gives a buffer for so many float64.
    """

    def __init__(self, make: Callable[[int], _Buffer] | None = None) -> None:
        self._make = make or _made
        self._idle: defaultdict[torch.device, list[_Buffer]] = defaultdict(list)
        self._lent: dict[int, tuple[torch.device, _Buffer]] = {}

    def take(self, device: torch.device, count: int) -> _Buffer:
        """Lend a buffer for so many float64; its event was recorded on this device only."""
        idle = self._idle[device]
        at = next((at for at, one in enumerate(idle) if one.host.numel() >= count), None)
        buffer = idle.pop(at) if at is not None else self._make(1 << max(6, (count - 1).bit_length()))
        self._lent[id(buffer)] = device, buffer
        return buffer

    def give_back(self, buffer: _Buffer) -> None:
        """Take a buffer back that no copy goes to any more."""
        device, _ = self._lent.pop(id(buffer))
        self._idle[device].append(buffer)

    def close(self) -> None:
        """Free the buffers, but keep for ever those of a device that does not answer."""
        _keep(one.host for one in self._all() if not _answers(one.event))
        self._idle.clear()
        self._lent.clear()

    def _all(self) -> Iterator[_Buffer]:
        for idle in self._idle.values():
            yield from idle
        for _, buffer in self._lent.values():
            yield buffer


def _made(count: int) -> _Buffer:
    host = torch.empty(count, dtype=torch.float64, pin_memory=True)
    return _Buffer(host, torch.cuda.Event())  # type: ignore[no-untyped-call]


def _answers(event: Any) -> bool:
    """Tell whether the device is well; while a graph is being captured it may not be asked."""
    try:
        if torch_state.is_capturing():
            return False
        event.query()
    except RuntimeError:
        return False
    return True


def _keep(tensors: Iterable[Tensor]) -> None:
    """Never free these: the reference that is added here nobody drops."""
    for tensor in tensors:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(tensor))


class Later:
    """Numbers that are on their way.

    Args:
        deliver: calls a plugin back; gets its context, the function and the numbers, and raises nothing of a plugin's.
    """

    def __init__(self, deliver: Callable[[Context, Callable[[list[float]], None], list[float]], None]) -> None:
        self._deliver = deliver
        self._asked: deque[_Asked] = deque()
        self._sent: deque[tuple[list[_Asked], list[_Copy]]] = deque()
        self._buffers = Buffers()

    def ask(self, context: Context, values: Sequence[Tensor], then: Callable[[list[float]], None]) -> None:
        """Have `then` called with the elements of `values`, all in one list; any thread may ask.

        Raises:
            ValueError: they are not dense, or not all on one device.
        """
        if not values:
            return
        device = values[0].device
        for value in values:
            if value.layout is not torch.strided or value.device != device:
                raise ValueError(f"dense tensors of {device} can be read later, not {value.layout} on {value.device}")
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._asked.append(_Asked(context, values, then, stream))
        if len(self._asked) >= LIMIT:
            self._send()

    def turn(self) -> None:
        """End a step: deliver what has arrived, and send what was asked for meanwhile."""
        if not (self._asked or self._sent):
            return
        undo: list[Any] = []
        was = torch_state.is_grad_enabled()
        try:
            if torch_state.enter(undo):
                torch_state.set_grad_enabled(False)
                self._take()
                if self._asked:
                    self._send()
        finally:
            if undo:
                try:
                    torch_state.set_grad_enabled(was)
                finally:
                    torch_state.leave(undo)

    def clear(self) -> None:
        """Forget all of it."""
        self._asked.clear()
        self._buffers.close()
        self._sent.clear()

    def _send(self) -> None:
        asked = [
            self._asked.popleft() for _ in range(len(self._asked))
        ]  # what others add meanwhile is for the next time
        places: dict[tuple[torch.device, Any], list[_Asked]] = {}
        for one in asked:
            places.setdefault((one.values[0].device, one.stream), []).append(one)
        copies = [copy for (device, stream), there in places.items() for copy in self._copies(there, device, stream)]
        self._sent.append((asked, copies))
        if all(device.type == "cpu" for device, _ in places):
            self._take()

    def _take(self) -> None:
        """Hand out what has arrived, in the order in which it was asked for, whatever device it was on."""
        while self._sent:
            asked, copies = self._sent[0]
            if not all(copy.is_over() for copy in copies):
                return
            self._sent.popleft()
            numbers = {id(one): got for copy in copies for one, got in _parts(copy)}
            for copy in copies:
                if copy.buffer is not None:
                    self._buffers.give_back(copy.buffer)
            for one in asked:
                if id(one) in numbers:
                    self._deliver(one.context, one.then, numbers[id(one)])

    def _copies(self, asked: list[_Asked], device: torch.device, stream: Any) -> list[_Copy]:
        """Send all in one; where a tensor of some odd kind is among them, those of each request that can be sent."""
        try:
            if stream is not None:
                return [self._copied(asked, device, stream)]
            # There is no event that all of these devices have: by the next step it will be there.
            return [_Copy(asked, _joined(asked, device))]
        except (RuntimeError, TypeError, NotImplementedError):
            return [] if len(asked) == 1 else [copy for one in asked for copy in self._copies([one], device, stream)]

    def _copied(self, asked: list[_Asked], device: torch.device, stream: Any) -> _Copy:
        """Copy on the stream that the values were made on, so that no stream has to wait for another."""
        with torch.cuda.stream(stream):
            joined = _joined(asked, device)
            buffer = self._buffers.take(device, joined.numel())
            host = buffer.host[: joined.numel()].copy_(joined, non_blocking=True)
            buffer.event.record(stream)
        return _Copy(asked, host, buffer)


def _parts(copy: _Copy) -> Iterator[tuple[_Asked, list[float]]]:
    numbers, at = copy.host.tolist(), 0
    for one in copy.asked:
        size = sum(value.numel() for value in one.values)
        yield one, numbers[at : at + size]
        at += size


def _joined(asked: list[_Asked], device: torch.device) -> Tensor:
    wide = torch.float32 if device.type == "mps" else torch.float64  # Apple's GPUs have no float64
    values = [value for one in asked for value in one.values]
    if not all(map(_is_there, values)):  # it was when they were asked for
        raise RuntimeError("their memory is not there")
    parts = []
    for _, alike in groupby(values, _dtype):  # those of one type together: each conversion is one more launch
        flat = [value.detach().reshape(-1).to(device, non_blocking=True) for value in alike]
        parts.append((flat[0] if len(flat) == 1 else torch.cat(flat)).to(wide))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _is_there(value: Tensor) -> bool:
    return type(value) not in PLAIN or not value.numel() or is_readable(value)
