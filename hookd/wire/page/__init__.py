"""The page: the shared memory in which an agent publishes and a daemon reads. Runs on both sides, stdlib only.

One process writes (`PageWriter`), through one memory map; any number read (`PageReader`), by `pread`. `layout` says what
lies where. The reader outlives the writer: the last bytes of a killed process can still be read through an open descriptor.
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
    STATES,
    STEP,
    STEP_RECORD,
    TID,
)
from hookd.wire.page.reader import PageReader
from hookd.wire.page.snapshot import Family, Heartbeat, ModuleEntry, Record, Series, Snapshot
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
    "STATES",
    "STEP",
    "STEP_RECORD",
    "TID",
    "Family",
    "Heartbeat",
    "ModuleEntry",
    "PageReader",
    "PageWriter",
    "Record",
    "Series",
    "Snapshot",
]
