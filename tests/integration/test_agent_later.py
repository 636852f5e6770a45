"""The host's memory that a device copies to, with events of the test's own: it is freed while the device answers only."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch

from hookd.api.accelerator import Accelerator
from hookd.target.tensors import deferred
from hookd.target.tensors.deferred import MANY, Buffers, Later, _Buffer, _Copy, _Request


class Event:
    """An event like those of a device with an error: whoever queries it gets that error."""

    def __init__(self) -> None:
        self.is_lost = False
        self.is_over = True

    def query(self) -> bool:
        if self.is_lost:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return self.is_over


@pytest.fixture
def buffers():
    return Buffers(lambda _device, count: _Buffer(torch.empty(count, dtype=torch.float64), Event()))


GPU, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)


def test_a_buffer_is_used_again_on_the_device_that_it_was_used_on(buffers):
    first = buffers.take(GPU, 100)
    assert first.host.numel() == 128
    assert buffers.take(GPU, 3) is not first, "it is lent"
    buffers.give_back(first)
    assert buffers.take(OTHER, 100) is not first, "torch records no event on two devices"
    assert buffers.take(GPU, 129) is not first, "it is too small"
    assert buffers.take(GPU, 128) is first


@pytest.mark.parametrize("is_lost", [False, True])
def test_what_a_device_that_is_lost_has_copied_to_is_never_freed(buffers, is_lost):
    lent, idle = buffers.take(GPU, 1), buffers.take(GPU, 1)
    buffers.give_back(idle)
    lent.event.is_lost = idle.event.is_lost = is_lost
    hosts = [weakref.ref(one.host) for one in (lent, idle)]
    buffers.close()
    del lent, idle
    gc.collect()
    assert [host() is not None for host in hosts] == [is_lost, is_lost]


def test_copies_are_delivered_in_order_once_they_are_over_and_a_failed_one_is_reported(buffers):
    reported = []
    later = Later(lambda _context, then, numbers: then(numbers))
    later._buffers = buffers
    taken = [buffers.take(GPU, 64) for _ in range(4)]
    for at, buffer in enumerate(taken):
        asked = [_Request(None, [torch.ones(1)], reported.append, lambda at=at: reported.append(f"lost {at}"), None)]
        host = buffer.host[:1].fill_(at) if at != 1 else torch.empty(1, device="meta")
        later._sent.append((asked, [_Copy(asked, host, buffer)]))
    taken[1].event.is_over = False
    later._waiting = MANY
    later.collect()
    assert reported == [[0.0]]
    taken[1].event.is_over = taken[3].event.is_lost = True
    later.end_step()
    assert reported == [[0.0], "lost 1", [2.0], "lost 3"]
    assert later._waiting == 0
    assert not buffers._lent


def test_a_copy_that_cannot_begin_keeps_no_buffer(buffers, monkeypatch):
    def fail(*_):
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(Event, "record", fail, raising=False)
    monkeypatch.setattr(deferred, "accelerator_of", lambda _: Accelerator("cpu", torch.cuda))
    later = Later(lambda *_: None)
    later._buffers = buffers
    asked = [_Request(None, [torch.ones(1)], print, None, None)]
    assert later._copies(asked, torch.device("cpu"), "a stream") == []
    assert not buffers._lent


def test_of_what_waits_the_tensors_are_counted(buffers):
    later = Later(lambda *_: None)
    later._buffers = buffers
    for is_over in (True, False):
        buffer = buffers.take(GPU, 64)
        buffer.event.is_over = is_over
        asked = [_Request(None, [torch.ones(1)] * 3, print, None, None)]
        later._sent.append((asked, [_Copy(asked, buffer.host[:3], buffer)]))
        later._waiting += 3
    later.end_step()
    assert later._waiting == 3
