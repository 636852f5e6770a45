"""Reads small tensors of a device a step later, without waiting for the device.

The requests of all plugins in one step are combined: one copy and one event per device, sent at the end of the step and
queried from the end of the next step on. Code that makes no steps, such as a validation, has them sent and queried between its
calls once many numbers wait.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict, deque
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hookd.api.accelerator import accelerator_of
from hookd.target.tensors import torch_state
from hookd.target.tensors.host_memory import PLAIN, is_readable
from hookd.wire.originals import RLock, clock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from hookd.api.context import Context

_dtype = attrgetter("dtype")
LIMIT = 1024
"""Number of requests that are sent without waiting for the step's end: code without steps must not fill the memory."""
MANY = 1024
"""Number of tensors that may wait for the step's end; with more, `collect` does the work of `turn`."""


class _Request(NamedTuple):
    context: Context
    values: Sequence[Tensor]
    then: Callable[[list[float]], None]
    lost: Callable[[], None] | None
    stream: Any


class _Buffer(NamedTuple):
    """Page-locked memory of the host, and the event after the last copy to it."""

    host: Tensor
    event: Any


class _Copy(NamedTuple):
    """A copy in progress to `host`, which lies in `buffer` if the device has events."""

    requests: list[_Request]
    host: Tensor
    buffer: _Buffer | None = None

    def is_over(self) -> bool:
        """Whether it has ended or failed."""
        try:
            return self.buffer is None or bool(self.buffer.event.query())
        except RuntimeError:
            return True

    def numbers(self) -> list[float]:
        """Return what was copied.

        Raises:
            RuntimeError: the copy has failed, or the device has met an error.
        """
        if self.buffer is not None:
            self.buffer.event.query()
        return self.host.tolist()


class Buffers:
    """Reusable page-locked buffers for copies from devices that have events.

    Torch records an event when page-locked memory is freed (ATen/core/CachingHostAllocator.h, `free`). After a device error
    this raises in a destructor, and the process ends with SIGABRT, without a traceback. So buffers are freed only at the
    end, and never if the device no longer answers.

    Args:
        make: returns a buffer for a device and a number of float64.
    """

    def __init__(self, make: Callable[[torch.device, int], _Buffer] | None = None) -> None:
        self._make = make or _made
        self._idle: defaultdict[torch.device, list[_Buffer]] = defaultdict(list)
        self._lent: dict[int, tuple[torch.device, _Buffer]] = {}

    def take(self, device: torch.device, count: int) -> _Buffer:
        """Lend a buffer for `count` float64; its event was recorded on this device only."""
        idle = self._idle[device]
        at = next((at for at, copy in enumerate(idle) if copy.host.numel() >= count), None)
        buffer = idle.pop(at) if at is not None else self._make(device, 1 << max(6, (count - 1).bit_length()))
        self._lent[id(buffer)] = device, buffer
        return buffer

    def give_back(self, buffer: _Buffer) -> None:
        """Take back a buffer that no copy uses any more."""
        device, _ = self._lent.pop(id(buffer))
        self._idle[device].append(buffer)

    def close(self) -> None:
        """Free the buffers; those of a device that does not answer are leaked on purpose."""
        _keep(copy.host for copy in self._all() if not _answers(copy.event))
        self._idle.clear()
        self._lent.clear()

    def _all(self) -> Iterator[_Buffer]:
        for idle in self._idle.values():
            yield from idle
        for _, buffer in self._lent.values():
            yield buffer


def _made(device: torch.device, count: int) -> _Buffer:
    accelerator = accelerator_of(device.type)
    assert accelerator is not None  # it has the stream of the copy
    return _Buffer(torch.empty(count, dtype=torch.float64, pin_memory=True), accelerator.event())


def _answers(event: Any) -> bool:
    """Whether the device works; False during the capture of a CUDA graph, when it must not be queried."""
    try:
        if torch_state.is_capturing():
            return False
        event.query()
    except RuntimeError:
        return False
    return True


def _keep(tensors: Iterable[Tensor]) -> None:
    """Leak these tensors: nothing drops the reference that is added here."""
    for tensor in tensors:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(tensor))


class Later:
    """Requested numbers that have not arrived yet; `deliver` calls a plugin back, and lets none of its exceptions through."""

    def __init__(self, deliver: Callable[[Context, Callable[[list[float]], None], list[float]], None]) -> None:
        self._deliver = deliver
        self._requested: deque[_Request] = deque()
        self._sent: deque[tuple[list[_Request], list[_Copy]]] = deque()
        self._arrived: deque[tuple[_Request, list[float] | None]] = deque()
        self._arriving = RLock()  # several threads may call models in turn; one of them reads what has arrived
        self._waiting = 0  # number of tensors
        self._buffers = Buffers()

    def ask(
        self,
        context: Context,
        values: Sequence[Tensor],
        then: Callable[[list[float]], None],
        lost: Callable[[], None] | None = None,
    ) -> None:
        """Request a call of `then` with the elements of `values` in one list; any thread may call this.

        If the tensors cannot be copied, `lost` is called in its place. Requests are answered in their order.

        Raises:
            ValueError: the tensors are not dense, or not all on one device.
        """
        if not values:
            return
        device = values[0].device
        for value in values:
            if value.layout is not torch.strided or value.device != device:
                raise ValueError(f"tensors must be dense and on {device}, not {value.layout} on {value.device}")
        accelerator = accelerator_of(device.type)
        stream = None if accelerator is None else accelerator.stream(device)
        self._requested.append(_Request(context, values, then, lost, stream))
        self._waiting += len(values)
        if len(self._requested) >= LIMIT:
            self._send()

    def end_step(self) -> None:
        """End a step: deliver the numbers that have arrived, and send the new requests."""
        if not (self._requested or self._sent or self._arrived):
            return
        undo: list[Any] = []
        was = torch_state.is_grad_enabled()
        try:
            if torch_state.enter(undo):
                torch_state.set_grad_enabled(False)
                self._take()
                if self._requested:
                    self._send()
        finally:
            if undo:
                try:
                    torch_state.set_grad_enabled(was)
                finally:
                    torch_state.leave(undo)

    def finish(self, seconds: float) -> None:
        """Deliver the numbers that arrive within this time: no step follows."""
        deadline = clock.monotonic() + seconds
        self.end_step()
        while self._sent and clock.monotonic() < deadline:
            clock.sleep(0.002)
            self.end_step()

    def collect(self) -> None:
        """Deliver and send between two calls, if many numbers wait: code that makes no steps must not fill the memory."""
        if self._waiting >= MANY:
            self.end_step()

    def clear(self) -> None:
        """Discard all requests, and free the buffers."""
        self._requested.clear()
        self._arrived.clear()
        self._buffers.close()
        self._sent.clear()

    def _send(self) -> None:
        # Requests that other threads add meanwhile are sent the next time.
        requests = [self._requested.popleft() for _ in range(len(self._requested))]
        places: dict[tuple[torch.device, Any], list[_Request]] = {}
        for request in requests:
            places.setdefault((request.values[0].device, request.stream), []).append(request)
        copies = [copy for (device, stream), there in places.items() for copy in self._copies(there, device, stream)]
        self._sent.append((requests, copies))
        if all(device.type == "cpu" for device, _ in places):
            self._take()

    def _take(self) -> None:
        """Deliver the numbers that have arrived, in the order of the requests, across devices."""
        if self._arriving.acquire(blocking=False):  # else another thread does the same
            try:
                while self._sent and all(copy.is_over() for copy in self._sent[0][1]):
                    self._read(*self._sent.popleft())
                if not (self._requested or self._sent):
                    self._waiting = 0  # threads that count at the same time may miscount
            finally:
                self._arriving.release()
        # One by one: if a signal handler raises while a plugin has its numbers, or the plugin asks for more, the others get theirs.
        while self._arrived:
            try:
                request, numbers = self._arrived.popleft()
            except IndexError:  # another thread was faster
                return
            if numbers is not None:
                self._deliver(request.context, request.then, numbers)
            elif request.lost is not None:
                self._deliver(request.context, partial(_call_lost, request.lost), [])

    def _read(self, requests: list[_Request], copies: list[_Copy]) -> None:
        """Read the numbers of finished copies."""
        numbers: dict[int, list[float]] = {}
        for copy in copies:
            try:
                numbers.update((id(request), got) for request, got in _parts(copy))
            except RuntimeError:  # on a device without events, only the reading shows that the copy has failed
                continue
            finally:
                if copy.buffer is not None:
                    self._buffers.give_back(copy.buffer)
        self._arrived.extend((request, numbers.get(id(request))) for request in requests)
        self._waiting -= sum(len(request.values) for request in requests)

    def _copies(self, requests: list[_Request], device: torch.device, stream: Any) -> list[_Copy]:
        """Return one copy for all requests; if a tensor cannot be copied, one for each request that can."""
        try:
            if stream is not None:
                return [self._copied(requests, device, stream)]
            # A device without events: by the next step the values will be ready.
            return [_Copy(requests, _joined(requests, device))]
        except (RuntimeError, TypeError, NotImplementedError):
            if len(requests) == 1:
                return []
            return [copy for request in requests for copy in self._copies([request], device, stream)]

    def _copied(self, requests: list[_Request], device: torch.device, stream: Any) -> _Copy:
        """Copy on the stream that the values were made on, so that no stream has to wait for another."""
        accelerator = accelerator_of(device.type)
        assert accelerator is not None  # it has the stream
        with accelerator.on(stream):
            joined = _joined(requests, device)
            buffer = self._buffers.take(device, joined.numel())
            try:
                host = buffer.host[: joined.numel()].copy_(joined, non_blocking=True)
                buffer.event.record(stream)
            except BaseException:
                self._buffers.give_back(buffer)
                raise
        return _Copy(requests, host, buffer)


def _call_lost(lost: Callable[[], None], _: list[float]) -> None:
    """Call `lost` in place of a function that gets numbers."""
    lost()


def _parts(copy: _Copy) -> Iterator[tuple[_Request, list[float]]]:
    numbers, at = copy.numbers(), 0
    for request in copy.requests:
        size = sum(value.numel() for value in request.values)
        yield request, numbers[at : at + size]
        at += size


def _joined(requests: list[_Request], device: torch.device) -> Tensor:
    wide = torch.float32 if device.type == "mps" else torch.float64  # Apple's GPUs have no float64
    values = [value for request in requests for value in request.values]
    if not all(map(_is_there, values)):  # the memory may have been freed since the request
        raise RuntimeError("the memory of a tensor has been freed")
    parts = []
    for _, alike in groupby(values, _dtype):  # one conversion per group: each is one more kernel launch
        flat = [_real(value.detach()).reshape(-1).to(device, non_blocking=True) for value in alike]
        parts.append((flat[0] if len(flat) == 1 else torch.cat(flat)).to(wide))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _real(value: Tensor) -> Tensor:
    """Return the real part: torch takes it as well, with a warning on the training's stderr."""
    return value.real if value.is_complex() else value


def _is_there(value: Tensor) -> bool:
    return type(value) not in PLAIN or not value.numel() or is_readable(value)
