"""The page: shared memory in which an agent publishes its numbers, and which a daemon reads. Stdlib only; used on both sides.

One process writes (`PageWriter`), through a memory map; any number of processes read (`PageReader`), with `pread`. `layout`
describes the regions. A reader can outlive the writer: it still reads a killed process's last bytes through its descriptor.
"""

from __future__ import annotations

from hookd.wire.page.layout import (
    CALL_RECORD,
    EVENTS,
    HEARTBEATS,
    KINDS,
    MIN_SIZE,
    MODULE,
    NAME,
    PHASE,
    PHASE_RECORD,
    PHASES,
    PROTOCOL,
    SIZE,
    STEP,
    STEP_RECORD,
)
from hookd.wire.page.reader import PageReader
from hookd.wire.page.snapshot import Family, Heartbeat, ModuleEntry, Record, Snapshot
from hookd.wire.page.writer import PageWriter

__all__ = [
    "CALL_RECORD",
    "EVENTS",
    "HEARTBEATS",
    "KINDS",
    "MIN_SIZE",
    "MODULE",
    "NAME",
    "PHASE",
    "PHASES",
    "PHASE_RECORD",
    "PROTOCOL",
    "SIZE",
    "STEP",
    "STEP_RECORD",
    "Family",
    "Heartbeat",
    "ModuleEntry",
    "PageReader",
    "PageWriter",
    "Record",
    "Snapshot",
]
