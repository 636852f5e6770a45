"""Where everything lies in a page, and what may stand there. Runs on both sides.

    header      words: magic, protocol, size, state, dropped, heads of the logs, table of the regions
    identity    log: JSON objects, the last one counts
    heartbeat   256 threads x 8 cells, then their names, 64 bytes each
    recorder    ring of 6-cell records
    incidents   log: JSON objects
    logs        log: JSON objects
    schema      log: JSON arrays that say which cells are which series
    values      cells

A *cell* is an aligned float64, a *word* an aligned uint64; both are loaded and stored whole.

A *log* has two halves. Records (length, crc32, payload) are appended to one half; to drop records, those that stay are
written into the other half, and then one word, the head (`flips << 32 | used bytes`), is replaced. So there is no moment
at which a killed writer leaves a page that cannot be read, and a reader sees by the flips that its copy may be torn. The
flips of the schema are the page's *generation*: a cell that was freed is used again in a later generation only.

What every protocol has in common, so that any hookd can tell any other's agent: the words magic, protocol and state, the
head of the identity, the first entry of the table, and how a log is written. All else goes with PROTOCOL.
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
PROTOCOL = 1
SIZE = 64 << 20  # bytes; every page has a power of two of them
MIN_SIZE = 4 << 20

STATES = ("starting", "running", "detaching", "detached", "exited")
PHASES = ("other", "forward", "backward", "optimizer", "loss", "data", "paused")
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
END_OF_TIME = 253402300800.0  # the last second that datetime can show
MAX_MESSAGE = 4096  # characters of a text in an incident, a log line, the identity

# Shared between writer and reader only.
HEADER_BYTES = 4096
WORDS = struct.Struct("=40Q")  # the header as far as it is used
MAGIC_WORD, PROTOCOL_WORD, SIZE_WORD, STATE_WORD, DROPPED_WORD = range(5)
HEAD_WORDS = {"identity": 8, "schema": 9, "incidents": 10, "logs": 11}
TABLE_WORD = 16  # offset and length of the first region, then of the next
REGIONS = ("identity", "heartbeat", "recorder", "incidents", "logs", "schema", "values")
LOW32 = 0xFFFFFFFF
BEAT_CELLS = 8
NAME_BYTES = 64
BEAT = struct.Struct("=5d")  # tid, module, events, phase, step
RECORD = struct.Struct("=6d")  # seq, when, kind, module, step, value
STEP_RECORD, CALL_RECORD, PHASE_RECORD = 1, 2, 3
"""Kinds of records: a step is done (`value`: its seconds), a module is called, a phase begins (`value`: which)."""
SCRATCH_CELLS = 256  # the first of the values: where series go that found no room
F_ADD_SEALS, F_GET_SEALS = 1033, 1034  # fcntl.h; Python lacks the names where its libc was old

_METRIC = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*", re.ASCII)
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*", re.ASCII)


class Region(NamedTuple):
    """Where a part of the page lies, in bytes."""

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
    """What a family is: name without `_total`, kind, help, label names, upper bounds of a histogram without +Inf."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...]

    @property
    def width(self) -> int:
        """How many cells a series has: one; of a histogram one for each bucket, one for +Inf, one for the sum."""
        return len(self.buckets) + 2 if self.buckets else 1

    def check(self) -> Declaration:
        """Return it; raise ValueError, or TypeError where the types are wrong, if Prometheus would refuse it."""
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


def clean(text: str, limit: int = MAX_TEXT) -> str:
    """Cut to `limit` characters and replace what UTF-8 cannot carry (the lone surrogates of undecodable file names)."""
    text = text[:limit]
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def plain(value: object, limit: int = MAX_MESSAGE, depth: int = 6) -> Any:
    """Reduce to what JSON, SQLite and a terminal can carry: bounded in depth, count and length, with finite numbers."""
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
        return {clean(str(k), 64): plain(v, limit, depth - 1) for k, v in items if isinstance(k, (str, int))}
    if depth and isinstance(value, (list, tuple)):
        return [plain(item, limit, depth - 1) for item in value[:64]]
    return f"({type(value).__name__})"
