"""The host's memory that a device copies to, with events of the test's own: it is freed while the device answers only."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from hookd.target.tensors.deferred import Buffers, _Buffer


class Event:
    """As one of a device that has met an error: whoever asks gets that error."""

    def __init__(self) -> None:
        self.is_lost = False

    def query(self) -> bool:
        if self.is_lost:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return True


@pytest.fixture
def buffers():
    return Buffers(lambda count: _Buffer(torch.empty(count, dtype=torch.float64), Event()))


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
