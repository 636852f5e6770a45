"""Where memory is: the process as the kernel sees it, the devices as CUDA's allocator sees them. Runs in the target."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from hookd import Context, Counter

STATM = Path("/proc/self/statm")
is_cuda_initialized: Any = torch.cuda.is_initialized
"""A look at a flag; asking CUDA itself would initialise it."""


class Resident:
    """The process' resident memory, from /proc; where there is none (some containers), nothing.

    Source: Linux, Documentation/filesystems/proc.rst: the second number is what is resident, the third what of it
    belongs to files and shared memory, in pages.
    """

    def __init__(self, context: Context) -> None:
        self._gauge = context.gauge("resident_bytes", "Resident memory of the process, once a second.", ["kind"])
        self._context = context
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._error = ""

    def look(self) -> dict[str, int]:
        """Store what there is; give the place whose growth tells of a leak."""
        try:
            # Opened each time: the program may close what it has not opened, and use the number itself.
            words = STATM.read_bytes().split()
        except OSError as error:
            if str(error) != self._error:
                self._error = str(error)
                self._context.log(f"resident memory is not seen: {error}")
            return {}
        resident, shared = (int(word) * self._page for word in words[1:3])
        self._gauge.labels("anonymous").set(resident - shared)
        self._gauge.labels("shared").set(shared)
        return {"anonymous": resident - shared}


class CUDA:
    """The books of CUDA's caching allocator; where CUDA is not initialised, nothing, and it stays so."""

    def __init__(self, context: Context) -> None:
        gauge, counter, device = context.gauge, context.counter, ["device"]
        self._context = context
        self._gauges = {
            "current": gauge("cuda_allocated_bytes", "Allocated at the end of the last sampled step.", device),
            "peak": gauge("cuda_peak_bytes", "Allocated at most, since the training code last reset that.", device),
        }
        self._reserved = gauge(
            "cuda_reserved_bytes", "Held by the allocator at the end of the last sampled step.", device
        )
        self._counters: dict[str, Counter] = {
            "num_alloc_retries": counter("cuda_retries", "Allocations that had to free the cache first.", device),
            "num_ooms": counter("cuda_ooms", "Allocations that failed.", device),
        }
        self._counted: dict[tuple[str, int], int] = {}
        self._lowest: dict[str, int] = {}
        self._steps = 0

    def allocated(self, device: Any) -> int:
        """Give the bytes allocated on a device, the current one for None."""
        books = torch.cuda.memory_stats_as_nested_dict(device)
        return int(books["allocated_bytes"]["all"]["current"]) if books else 0

    def look(self) -> None:
        """Store what all devices have, at the end of every `interval`th step."""
        self._steps += 1
        if self._steps < self._context.interval or not is_cuda_initialized():
            return
        self._steps = 0
        for at in range(torch.cuda.device_count()):
            books = torch.cuda.memory_stats_as_nested_dict(at)
            if books and books["reserved_bytes"]["all"]["peak"]:
                self._store(at, books)

    def _store(self, at: int, books: dict[str, Any]) -> None:
        device, allocated = f"cuda:{at}", books["allocated_bytes"]["all"]
        for key, gauge in self._gauges.items():
            gauge.labels(device).set(allocated[key])
        self._reserved.labels(device).set(books["reserved_bytes"]["all"]["current"])
        for key, counter in self._counters.items():
            now = int(books[key])
            counter.labels(device).inc(max(0, now - self._counted.get((key, at), now)))
            self._counted[key, at] = now
        self._lowest[device] = min(allocated["current"], self._lowest.get(device, allocated["current"]))

    def lowest(self) -> dict[str, int]:
        """Give what was allocated at least at the ends of the steps since the last call."""
        lowest, self._lowest = self._lowest, {}
        return lowest
