"""Detect memory that grows so fast that it is used up soon.

Only private memory counts: pages of files, such as a mapped dataset, are resident too, but the kernel takes them back. What is left
is the smallest of the machine's available memory and the limits of the process's cgroups. Growth before the first steps is
loading, and does not count.
"""

from __future__ import annotations

import os
import time
from collections import deque
from typing import TYPE_CHECKING

from hookd.errors import HookdError
from hookd.tool.linux import headroom, proc
from hookd.tool.reports.report import steps as steps_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hookd.tool.daemon.fleet.fleet import Fleet
    from hookd.tool.daemon.fleet.targets import Target
    from hookd.tool.daemon.watch.watcher import Declared

GROWTH, OVER = "memory_growth", "memory_growth_over"
"""The kinds of its incidents."""
EVERY_S, READINGS = 5.0, 13
"""Interval of the readings, and their number: they cover a minute."""
STEADY = 10
"""Number of intervals, of twelve, in which memory must have grown."""
LEAST_BYTES = 256 << 20
"""Minimum growth in that minute."""
SOON_S = 900.0
"""It must be used up within this time, at the same rate."""
STEPS = 3
"""Number of completed steps from which on memory is watched."""


class MemoryGrowth:
    """Watches the memory of every target; reports steep growth, and when it is over.

    Args:
        fleet: to which it reports.
        clock: monotonic, in seconds.
        private: returns the private resident memory of a process in bytes; None if it cannot be read.
        left: returns how many bytes a process can still take; None if unknown.
    """

    families: Sequence[Declared] = ()

    def __init__(
        self,
        fleet: Fleet,
        clock: Callable[[], float] = time.monotonic,
        private: Callable[[int], int | None] | None = None,
        left: Callable[[int], int | None] = headroom.memory_left,
    ) -> None:
        self._fleet, self._clock = fleet, clock
        self._private, self._left = private or private_bytes, left
        self._readings: dict[Target, deque[int]] = {}
        self._polled = -EVERY_S

    def poll(self, targets: Sequence[Target]) -> None:
        """Read the memory of each target; see `watch.Watcher`."""
        now = self._clock()
        if now - self._polled < EVERY_S:
            return
        # After a longer pause the readings would not be comparable.
        known = self._readings if now - self._polled < 2 * EVERY_S else {}
        self._polled = now
        self._readings = {target: known.get(target, deque(maxlen=READINGS)) for target in targets if _trains(target)}
        for target, readings in self._readings.items():
            private = self._private(target.pid)
            if private is None:
                readings.clear()
                continue
            readings.append(private)
            if len(readings) == READINGS:
                self._judge(target, readings)

    def samples(self, _target: Target) -> tuple[()]:
        """Return nothing; `hookd_target_resident_memory_bytes` is the collector's."""
        return ()

    def _judge(self, target: Target, readings: Sequence[int]) -> None:
        grown = readings[-1] - readings[0]
        is_reported = GROWTH in target.ongoing
        if is_reported and grown < LEAST_BYTES:
            self._fleet.report(
                target, OVER, f"its memory has grown by {_size(max(0, grown))} in the last minute, no longer steeply"
            )
        is_steady = sum(b > a for a, b in zip(readings, list(readings)[1:], strict=False)) >= STEADY
        if is_reported or grown < LEAST_BYTES or not is_steady:
            return
        left, rate = self._left(target.pid), grown / (EVERY_S * (READINGS - 1))
        if left is not None and left / rate < SOON_S:
            message = (
                f"its memory grows by {_size(rate)} a second, {_size(grown)} in the last minute: the remaining {_size(left)} "
                f"last {left / rate / 60:.0f} minutes. {_next_step(target)}"
            )
            self._fleet.report(target, GROWTH, message, bytes_per_second=rate, bytes_left=left)


def private_bytes(pid: int) -> int | None:
    """Return the resident memory of a process without pages of files and shared memory, in bytes; None if it cannot be read."""
    try:
        _, resident, shared, *_ = proc.read(pid, "statm").split()
        return (int(resident) - int(shared)) * os.sysconf("SC_PAGESIZE")
    except (HookdError, OSError, ValueError):
        return None


def _trains(target: Target) -> bool:
    snapshot = target.last()
    return target.ended is None and snapshot is not None and steps_of(snapshot) >= STEPS


def _next_step(target: Target) -> str:
    """Return what to do; plugin `memory` knows outputs of modules and losses that are kept, and nothing else."""
    snapshot = target.last()
    if snapshot is None or all(family.name != "hookd_memory_resident_bytes" for family in snapshot.families):
        return f"`hookd plugin enable {target.pid} memory` shows which outputs and losses are kept"
    return (
        "Plugin memory reports a `leak` if outputs or losses are kept; otherwise look for lists and caches that grow in the training's own "
        f"code: `memray attach {target.pid}` shows which lines allocate"
    )


def _size(number: float) -> str:
    return f"{number / (1 << 30):.1f} GiB" if number >= 1 << 30 else f"{number / (1 << 20):.0f} MiB"
