"""Read the memory of the process from the kernel, and of the devices from torch's allocator."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookd import accelerators

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hookd import Context, Counter

STATM = Path("/proc/self/statm")


class Resident:
    """The resident memory of the process, from /proc; without /proc (some containers), there are no series.

    Source: Linux, Documentation/filesystems/proc.rst: the second number is the resident size, the third the part of it
    that belongs to files and shared memory, both in pages.
    """

    def __init__(self, context: Context) -> None:
        self._gauge = context.gauge("resident_bytes", "Resident memory of the process, once a second.", ["kind"])
        self._context = context
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._error = ""

    def publish(self) -> dict[str, int]:
        """Publish the resident memory; return the place to follow for leaks, with its bytes."""
        try:
            # Opened each time: the program may close a descriptor that is not its own, and reuse its number.
            words = STATM.read_bytes().split()
        except OSError as error:
            if str(error) != self._error:
                self._error = str(error)
                self._context.log(f"cannot read the resident memory: {error}")
            return {}
        resident, shared = (int(word) * self._page for word in words[1:3])
        self._gauge.labels("anonymous").set(resident - shared)
        self._gauge.labels("shared").set(shared)
        return {"anonymous": resident - shared}


def is_in_use() -> bool:
    """Whether the program has initialized a device."""
    return any(one.is_in_use() for one in accelerators())


class Allocators:
    """Statistics of torch's allocators of devices; never initializes a device, and has no series until the program does."""

    def __init__(self, context: Context) -> None:
        gauge, counter, device = context.gauge, context.counter, ["device"]
        self._context = context
        self._gauges = {
            "current": gauge("device_allocated_bytes", "Allocated at the end of the last sampled step.", device),
            "peak": gauge(
                "device_peak_bytes", "Peak of the allocated bytes since the training code last reset it.", device
            ),
        }
        self._reserved = gauge(
            "device_reserved_bytes", "Reserved by the allocator at the end of the last sampled step.", device
        )
        self._counters: dict[str, Counter] = {
            "num_alloc_retries": counter("device_retries", "Allocations that had to free the cache first.", device),
            "num_ooms": counter("device_ooms", "Allocations that failed.", device),
        }
        self._counted: dict[tuple[str, str], int] = {}
        self._lowest: dict[str, int] = {}
        self._steps = 0

    def publish(self) -> None:
        """Publish the memory of all devices, at the end of every `interval`th step."""
        self._steps += 1
        if self._steps < self._context.interval or not is_in_use():
            return
        self._steps = 0
        for accelerator in accelerators():
            for device, stats in accelerator.memory() if accelerator.is_in_use() else ():
                self._store(device, stats)

    def _store(self, device: str, stats: Mapping[str, Any]) -> None:
        allocated = stats["allocated_bytes"]["all"]
        for key, gauge in self._gauges.items():
            gauge.labels(device).set(allocated[key])
        self._reserved.labels(device).set(stats["reserved_bytes"]["all"]["current"])
        for key, counter in self._counters.items():
            now = int(stats.get(key, 0))
            counter.labels(device).inc(max(0, now - self._counted.get((key, device), now)))
            self._counted[key, device] = now
        self._lowest[device] = min(allocated["current"], self._lowest.get(device, allocated["current"]))

    def lowest(self) -> dict[str, int]:
        """Return the smallest number of allocated bytes at the ends of the steps since the last call, by device."""
        lowest, self._lowest = self._lowest, {}
        return lowest
