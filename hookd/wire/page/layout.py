"""The layout of a page, and the limits of its contents. Used on both sides.

    header      words: magic, protocol, size, state, dropped, heads of the logs, table of the regions
    identity    log: JSON objects; the last one is current
    heartbeat   256 threads x 8 cells, then their names, 64 bytes each
    recorder    ring of 6-cell records
    incidents   log: JSON objects
    logs        log: JSON objects
    schema      log: JSON arrays that assign cells to series
    values      cells

A *cell* is an aligned float64, a *word* an aligned uint64; both are loaded and stored as a whole.

A *log* has two halves. Records (length, crc32, payload) are appended to one half. To drop records, the writer copies the
others to the other half and then replaces one word, the head (`flips << 32 | used bytes`). So the page is readable at
whatever moment the writer is killed, and a reader that sees the flips change knows that its copy may be torn. The flips of
the schema are the page's *generation*: a freed cell is reused only in a later generation.

On ARM a reader sees stores in another order than they were made in, except where `hookd.wire.order` is used. Nothing orders two cells
of the values: a snapshot may have a later count beside an earlier sum. What a reader relies on, and what orders it:

    magic after all other words        barrier; the reader loads the others again after it has seen the magic word
    a head after the records           barrier; a record that is not all there has another crc32, and is read again later
    a cell's series after its 0.0      the same: the cells of a new series are cleared before its record is appended
    stores to a freed cell after the   barrier in `Log.replace`; the reader loads the heads before and after a copy, and
    head of the next generation        copies again if the flips differ
    a record of the recorder           barriers after the 0 that opens it and before the number that closes it; the reader copies it twice
    a thread's id after its name       barrier; both are in one copy, so a new thread may be shown with an old name, once

All protocols share the words magic, protocol and state, the head of the identity, the first entry of the table, and the
format of a log, so that every hookd can recognize the agent of every other. All else may change with PROTOCOL.
"""

from __future__ import annotations

import itertools
import math
import re
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

NAME = "hookd-page"
MAGIC = int.from_bytes(b"hookdpg\0", "little")
PROTOCOL = 2
SIZE = 64 << 20  # bytes; the size of every page is a power of two
MIN_SIZE = 4 << 20

STATES = ("starting", "running", "detaching", "detached", "exited")
PHASES = ("other", "forward", "backward", "optimizer", "data", "paused", "inference", "collectives")
KINDS = ("counter", "gauge", "histogram", "info")

HEARTBEATS = 256  # threads
TID, MODULE, EVENTS, PHASE, STEP = range(5)
"""Cells of a heartbeat, counted from its base."""

MAX_BUCKETS = 200
MAX_FAMILIES = 4096
MAX_LABELS = 16
MAX_MODULES = 100_000
MAX_RECORD = 15 << 10  # bytes of a log record
MAX_SERIES = 200_000
MAX_TEXT = 1024  # characters of a name, a label value, a help text
END_OF_TIME = 253402300800.0  # unix seconds; the end of what datetime can represent
MAX_MESSAGE = 4096  # characters of a text in an incident, a log line, the identity

# Shared between writer and reader only.
HEADER_BYTES = 4096
WORDS = struct.Struct("=40Q")  # the header as far as it is used
MAGIC_WORD, PROTOCOL_WORD, SIZE_WORD, STATE_WORD, DROPPED_WORD = range(5)
HEAD_WORDS = {"identity": 8, "schema": 9, "incidents": 10, "logs": 11}
TABLE_WORD = 16  # offset and length of each region in turn
REGIONS = ("identity", "heartbeat", "recorder", "incidents", "logs", "schema", "values")
LOW32 = 0xFFFFFFFF
BEAT_CELLS = 8
NAME_BYTES = 64
BEAT = struct.Struct("=5d")  # tid, module, events, phase, step
RECORD = struct.Struct(
    "=6d"
)  # seq, when, kind, module, step, value; `recorded` in native/entry.c hard-codes these six cells
STEP_RECORD, CALL_RECORD, PHASE_RECORD = 1, 2, 3
"""Kinds of records: end of a step (`value`: its seconds), call of a module, begin of a phase (`value`: its index)."""
SCRATCH_CELLS = 256  # the first of the values: shared by the series that found no room
F_ADD_SEALS, F_GET_SEALS = 1033, 1034  # fcntl.h; a Python built on an old libc lacks the names

_METRIC = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*", re.ASCII)
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*", re.ASCII)


class Region(NamedTuple):
    """Offset and length of a part of the page, in bytes."""

    offset: int
    length: int


def divide(size: int) -> dict[str, Region]:
    """Divide a page of `size` bytes, a power of two from MIN_SIZE up, into its regions."""
    ring = 1 << ((size // 16 // RECORD.size).bit_length() - 1)  # 65,536 records in 64 MiB
    lengths = {
        "identity": 64 << 10,
        "heartbeat": HEARTBEATS * (BEAT_CELLS * 8 + NAME_BYTES),
        "recorder": ring * RECORD.size,
        "incidents": size // 64,
        "logs": size // 128,
        "schema": size // 8 * 5,
    }
    regions, offset = {}, HEADER_BYTES
    for name in REGIONS:
        regions[name] = Region(offset, lengths.get(name, size - offset))
        offset += regions[name].length
    return regions


class Declaration(NamedTuple):
    """The declaration of a family: name without `_total`, kind, help, label names, and upper bounds of a histogram without +Inf."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...]

    @property
    def width(self) -> int:
        """Number of cells of a series: one, but for a histogram one for each bucket, one for +Inf and one for the sum."""
        return len(self.buckets) + 2 if self.buckets else 1

    def check(self) -> Declaration:
        """Return the declaration if Prometheus accepts it.

        Raises:
            ValueError: Prometheus would refuse it.
            TypeError: a field has the wrong type.
        """
        name, kind, help_text, labels, buckets = self
        if kind not in KINDS or not _METRIC.fullmatch(name) or max(len(name), len(help_text)) > MAX_TEXT:
            raise ValueError(f"not a metric: {kind!r} {name!r}")
        if kind == "counter" and name.endswith("_total"):
            raise ValueError(f"{name}: name a counter without _total, which is added when it is rendered")
        if len(labels) > MAX_LABELS or len(set(labels)) != len(labels):
            raise ValueError(f"{name}: labels {labels!r} repeat or are more than {MAX_LABELS}")
        for label in labels:
            if not _LABEL.fullmatch(label) or len(label) > MAX_TEXT or (label == "le" and kind == "histogram"):
                raise ValueError(f"{name}: {label!r} cannot be a label")
        if (kind == "histogram") != bool(buckets) or len(buckets) > MAX_BUCKETS:
            raise ValueError(f"{name}: a histogram has 1 to {MAX_BUCKETS} buckets, nothing else has any")
        if not all(map(math.isfinite, buckets)) or any(not a < b for a, b in itertools.pairwise(buckets)):
            raise ValueError(f"{name}: buckets are finite and ascend (that of +Inf is implied)")
        return self


def phase_name(number: float) -> str:
    """Return the name of a phase by its number in the page; "other" for a number that is not a phase's."""
    return PHASES[int(number)] if 0 <= number < len(PHASES) else PHASES[0]


def clean(text: str, limit: int = MAX_TEXT) -> str:
    """Cut a text to `limit` characters and replace characters that UTF-8 cannot encode (lone surrogates of undecodable file names)."""
    text = text[:limit]
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def jsonable(value: object, limit: int = MAX_MESSAGE, depth: int = 6) -> Any:
    """Reduce a value to what JSON, SQLite and a terminal can represent: limited depth, count and length, finite numbers."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**63 else "(huge integer)"
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else f"{value:f}"
    if isinstance(value, str):
        return clean(value, limit)
    if depth and isinstance(value, Mapping):
        items = itertools.islice(value.items(), 64)
        return {clean(str(k), 64): jsonable(v, limit, depth - 1) for k, v in items if isinstance(k, (str, int))}
    if depth and isinstance(value, (list, tuple)):
        return [jsonable(item, limit, depth - 1) for item in value[:64]]
    return f"({type(value).__name__})"
