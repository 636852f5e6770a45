"""A device that exists in torch's interface only: no tensor is on it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from hookd import accelerator_of

if TYPE_CHECKING:
    import pytest

KIND = "fake"


class SimulatedDevice:
    """Stands in for a module such as `torch.xpu`, with one device.

    Attributes:
        is_in_use: whether the program has initialized it.
        allocated: bytes that torch's allocator has lent; it has reserved 1 MiB more.
    """

    def __init__(self, *, is_in_use: bool) -> None:
        self.is_in_use, self.allocated = is_in_use, 0
        self.default_generators = (torch.Generator(),)
        self.Event = torch.Event
        self.stream = contextlib.nullcontext

    def is_initialized(self) -> bool:
        return self.is_in_use

    def _is_in_bad_fork(self) -> bool:
        return False  # `torch.manual_seed` asks

    def manual_seed_all(self, seed: int) -> None:
        pass

    def device_count(self) -> int:
        return 1

    def current_stream(self, _device: object = None) -> object:
        return self

    def memory_stats_as_nested_dict(self, _device: object) -> dict[str, Any]:
        lent, reserved = ({"current": size, "peak": size} for size in (self.allocated, self.allocated + (1 << 20)))
        return {
            "allocated_bytes": {"all": lent},
            "reserved_bytes": {"all": reserved},
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }


def simulated_device(monkeypatch: pytest.MonkeyPatch, *, is_in_use: bool) -> SimulatedDevice:
    """Register a device of the type KIND with torch for the time of a test."""
    made = SimulatedDevice(is_in_use=is_in_use)
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: KIND)
    monkeypatch.setattr(torch, KIND, made, raising=False)
    accelerator_of.cache_clear()
    return made
