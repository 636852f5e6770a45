"""Facts about the end of a target, and the message about it.

Some facts are kept during its life, the kernel reports others about the end.

Unknown facts stay unknown: nothing is inferred from what is only likely. docs/deaths.md lists the sources in their order.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict

from hookd.errors import HookdError
from hookd.tool.linux import exits, oom, proc
from hookd.tool.reports.report import describe_steps, metrics, module_rows, thread_rows
from hookd.wire.module_names import ROOT
from hookd.wire.page import CALL_RECORD, PHASE_RECORD, STEP_RECORD
from hookd.wire.page.layout import jsonable, phase_name
from hookd.wire.text import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from hookd.wire.page import Record, Snapshot
    from hookd.wire.report import ModuleRow, ThreadRow

LATELY_S = 30.0
"""Seconds within which a kill for lack of memory counts as recent.

A killed process may take this long to release its memory, and ends only then.
"""
LAST = 64
"""Number of last events that are kept."""
MAX_DETAIL = 64 << 10
"""Limit of the last statistics, in characters of JSON."""
MAX_THREADS = 16
MAX_CGROUPS = 1000
"""Limit of memory cgroups that are remembered."""


class MemoryCgroup:
    """A memory cgroup, with the kernel's recent kills in it.

    Any thread may call its methods.

    Args:
        counter: see `oom.counter_of`.
    """

    def __init__(self, counter: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._counter, self._clock = counter, clock
        self._lock = threading.Lock()
        self._count = oom.kills(counter)
        self._recent_kills, self._last_kill_at = 0, clock()

    def poll(self) -> None:
        """Count new kills. This is called with each poll: an old kill says nothing about a process that dies now."""
        with self._lock:
            count, now = oom.kills(self._counter), self._clock()
            if now - self._last_kill_at > LATELY_S:
                self._recent_kills = 0
            if count is not None and self._count is not None and count > self._count:
                self._recent_kills, self._last_kill_at = self._recent_kills + count - self._count, now
            self._count = count if count is not None else self._count

    def take(self) -> bool:
        """Whether a process was recently killed in this cgroup. Each kill counts once, because it has one victim."""
        self.poll()
        with self._lock:
            self._recent_kills, is_recent = max(0, self._recent_kills - 1), self._recent_kills > 0
            return is_recent


class MemoryCgroups:
    """The memory cgroups of all targets, each read once in a poll."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counters: dict[bytes, Path] = {}  # by the content of /proc/PID/cgroup
        self._by_counter: weakref.WeakValueDictionary[Path, MemoryCgroup] = weakref.WeakValueDictionary()

    def of(self, pid: int) -> MemoryCgroup | None:
        """Return the memory cgroup of a process; None if unreadable."""
        counter = self._counter(pid)
        if counter is None:
            return None
        cgroup = self._by_counter.get(counter) or MemoryCgroup(counter, self._clock)
        return self._by_counter.setdefault(counter, cgroup)

    def _counter(self, pid: int) -> Path | None:
        """Return the counter of a process's cgroup.

        It is cached, because searching our mounts for each of thousands of processes of one cgroup takes too long.
        """
        name = b""
        with contextlib.suppress(OSError, HookdError):
            name = proc.read(pid, "cgroup")
        counter = self._counters.get(name) or oom.counter_of(pid)
        if len(self._counters) >= MAX_CGROUPS:
            self._counters.clear()
        if name and counter is not None:
            self._counters[name] = counter
        return counter

    def poll(self) -> None:
        """Read all cgroups."""
        for cgroup in list(self._by_counter.values()):
            cgroup.poll()


@dataclass(frozen=True)
class Evidence:
    """The known facts about an end.

    Attributes:
        status: as from wait(2); None if unknown.
        source: the source of the status, see `exits.Exit`.
        oom: what shows that the kernel has killed the process for lack of memory: "kernel log", "cgroup", or "".
        container_ended: the first process of its container has ended as well, or is about to.
    """

    status: int | None = None
    source: str = ""
    oom: str = ""
    container_ended: bool = False


class EvidenceReader:
    """The facts that must be read from a process before it ends.

    Attributes:
        memory: its memory cgroup, if that can be read.
    """

    def __init__(self, pid: int, ticks: int) -> None:
        self._pid, self._ticks = pid, ticks
        self.memory: MemoryCgroup | None = None
        self._image = ""
        with contextlib.suppress(OSError, HookdError):
            self._image = proc.image(pid)
        self._init = exits.container_init(pid)

    def read(self, pidfd: int) -> Evidence:
        """Collect the facts that are known about the end by now."""
        ending = exits.find(self._pid, self._ticks, self._image, pidfd)
        is_killed = ending.status is not None and ending.status & 0x7F == signal.SIGKILL
        return Evidence(
            ending.status,
            ending.source,
            self._oom() if is_killed else "",
            is_killed and self._init is not None and not exits.is_alive(*self._init),
        )

    def _oom(self) -> str:
        """Return what shows a kill for lack of memory.

        The kernel's log names the victim; without a log, the count of the cgroup decides.
        """
        victims = oom.killed(self._ticks / os.sysconf("SC_CLK_TCK"))
        if victims and self._pid not in victims:
            return ""
        # Taken even if the log names the victim: the cgroup's count must not remain for the next one, if the log is missing.
        is_counted = self.memory is not None and self.memory.take()
        return "kernel log" if victims else "cgroup" if is_counted else ""


class _LastEvent(TypedDict):
    event: str
    """`step`, `call`, a phase that began, or `kind N`."""
    time: float
    """Unix seconds."""
    step: int
    """The number of the step in which it occurred."""


class LastEvent(_LastEvent, total=False):
    """An event that a target recorded."""

    seconds: float
    """Duration of a step."""
    module: str | None
    """Of a call; None if it is unknown."""
    value: float
    """Of an event of an unknown kind."""


class Statistics(TypedDict, total=False):
    """Statistics of a target, as in its report; what exceeds the limit is absent."""

    metrics: dict[str, dict[str, object]]
    modules: list[ModuleRow]
    """Those that its threads were in."""


class LastSeen(TypedDict):
    """The last activity of a target, as an incident about its end has it."""

    step: int
    """The step that was not completed."""
    is_step_absolute: bool
    """Whether `step` counts from the beginning of the training, else from the attach."""
    module: str | None
    """The module of the main thread, or else of the first thread that was in one."""
    phase: str | None
    """The phase of that thread."""
    threads: list[ThreadRow]
    events: list[LastEvent]
    """The last ones, the newest last."""
    statistics: Statistics


@dataclass(frozen=True)
class Death:
    """An end in words.

    Attributes:
        reason: a word or two of a limited set, because it is a label. "exited" (0, or Python's own exit with an unknown
            status), "exit 3", "signal SIGSEGV", "oom", "exec", "page closed", "unknown".
        message: for a person, without the pid.
        is_incident: whether it is reported as an incident.
        fields: further facts, as JSON.
    """

    reason: str
    message: str
    is_incident: bool = True
    fields: Mapping[str, object] = field(default_factory=dict)


def judge(evidence: Evidence, snapshot: Snapshot | None, records: Sequence[Record] = ()) -> Death:
    """Return the words for an end.

    Args:
        evidence: how it ended.
        snapshot: the last copy of its page; None if there was no good one.
        records: the recorder's last records.
    """
    exited = snapshot is not None and snapshot.state == "exited"
    exception = _exception(snapshot) if exited and snapshot is not None else None
    after = f" after {_exception_text(exception, snapshot)}" if exception is not None and snapshot is not None else ""
    reason, message = _verdict(evidence, exited=exited, after=after)
    fields: dict[str, object] = {
        "reason": reason,
        "known_from": evidence.source or ("page" if exited else None),
        **_status(evidence),
    }
    if exception is not None and reason != "exited":
        fields["exception"] = exception
    if snapshot is not None:
        fields |= _last(snapshot, records)
    place = "" if exited else _place(fields, snapshot)
    is_bad = reason != "exited" or (evidence.status is None and exception is not None)
    return Death(reason, one_line(message + place), is_bad, fields)


def _verdict(evidence: Evidence, *, exited: bool, after: str) -> tuple[str, str]:
    if evidence.source == "exec":
        return "exec", "became another program (exec)"
    if evidence.source == "alive":
        text = "still runs, but has closed hookd's descriptors and is no longer observed: attach again"
        return "page closed", text
    if evidence.status is None:
        if exited:
            return "exited", f"ran Python's own exit{after}; its exit code is not known"
        return "unknown", "ended without Python's own exit; the cause is unknown"
    number, code = evidence.status & 0x7F, evidence.status >> 8
    if not number and not code:
        return "exited", "ended with exit code 0" + ("" if exited else ", without Python's own exit")
    if not number:
        how = after if exited else ", without Python's own exit: by os._exit, or by native code"
        return f"exit {code}", f"ended with exit code {code}{how}"
    if evidence.oom:
        sign = {"kernel log": "the kernel's log names it", "cgroup": "its memory cgroup counts the kill"}[evidence.oom]
        return "oom", f"{oom.KILLED} ({_name(number)}): {sign}"
    return f"signal {_name(number)}", _by_signal(evidence, number) + (
        f", during Python's own exit{after}" if exited else ""
    )


def _by_signal(evidence: Evidence, number: int) -> str:
    core = ", core dumped" if evidence.status is not None and evidence.status & 0x80 else ""
    text = signal.strsignal(number)
    if not text:
        return f"was killed by {_name(number)}{core}"
    container = "; its container has ended with it" if evidence.container_ended else ""
    return f"was killed by {_name(number)} ({text}){core}{container}"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def _status(evidence: Evidence) -> Mapping[str, object]:
    if evidence.status is None:
        return {}
    number = evidence.status & 0x7F
    if not number:
        return {"exit_code": evidence.status >> 8}
    return {
        "signal": _name(number),
        "core_dumped": bool(evidence.status & 0x80),
        "oom": evidence.oom or None,
        "container_ended": evidence.container_ended,
    }


def _exception(snapshot: Snapshot) -> dict[str, str] | None:
    """Return the agent's note about the exception that Python printed last. The texts come from the target."""
    raw = snapshot.identity.get("exception")
    if not isinstance(raw, dict) or not isinstance(raw.get("type"), str):
        return None
    return {key: raw[key] for key in ("type", "message", "where", "module") if isinstance(raw.get(key), str)}


def _exception_text(exception: Mapping[str, str], snapshot: Snapshot) -> str:
    message, where, module = (exception.get(key, "") for key in ("message", "where", "module"))
    first = message.strip().partition("\n")[0]
    inside = [part for part in (f"module {snapshot.described(module)}" if module else "", where) if part]
    return exception["type"] + (f": {first}" if first else "") + (f" ({', '.join(inside)})" if inside else "")


# -- what it did last


def _last(snapshot: Snapshot, records: Sequence[Record]) -> LastSeen:
    """Return the last places, events and statistics.

    There is a place for each thread. The statistics are those of the plugins.
    """
    step = describe_steps(snapshot)
    threads = thread_rows(snapshot)[:MAX_THREADS]
    main = next((thread for thread in threads if thread["tid"] == snapshot.identity.get("pid")), None)
    first = next((thread for thread in (main, *threads) if thread is not None and thread["module"]), main)
    modules = {thread["module"] for thread in threads}
    return {
        "step": step["current"] + 1,
        "is_step_absolute": step["is_absolute"],
        "module": first["module"] if first is not None else None,
        "phase": first["phase"] if first is not None else None,
        "threads": threads,
        "events": [_event(snapshot, record, step["offset"] or 0) for record in records[-LAST:]],
        "statistics": _bounded(metrics(snapshot), [row for row in module_rows(snapshot) if row["name"] in modules]),
    }


def _place(fields: Mapping[str, object], snapshot: Snapshot | None) -> str:
    module, phase = fields.get("module"), fields.get("phase")
    if isinstance(module, str) and module and snapshot is not None:
        return f"; last in {phase} of {'the root module' if module == ROOT else snapshot.described(module)}"
    return f"; last in phase {phase}" if phase not in (None, "other") else ""


def _event(snapshot: Snapshot, record: Record, offset: int) -> LastEvent:
    """Return a record as JSON. Its numbers come from the target, which counts its steps from the attach in records of steps alone."""
    when, step = record.when, record.step
    if record.kind == STEP_RECORD:
        return {"event": "step", "time": when, "step": step + offset, "seconds": record.value}
    if record.kind == PHASE_RECORD:
        return {"event": phase_name(record.value), "time": when, "step": step}
    if record.kind == CALL_RECORD:
        entry = snapshot.modules.get(record.module)
        module = entry.name if entry is not None else None
        return {"event": "call", "time": when, "step": step, "module": module}
    return {"event": f"kind {record.kind}", "time": when, "step": step, "value": record.value}


def _bounded(metrics: Mapping[str, object], modules: Sequence[ModuleRow]) -> Statistics:
    """Return the statistics, or as many of them as fit into the limit."""
    for statistics in ({"metrics": metrics, "modules": modules}, {"modules": modules}):
        clean: Statistics = jsonable(statistics)
        if len(json.dumps(clean)) <= MAX_DETAIL:
            return clean
    return {}
