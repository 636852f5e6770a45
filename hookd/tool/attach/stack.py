"""Collect where each thread of a target is: from its page, its Python and native stacks, and the kernel.

The page is always available: heartbeats are read without the target's help. The Python stacks come from the agent if its thread
gets the GIL, else from py-spy if that is installed. So there is an answer within seconds, whatever hangs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from typing import TYPE_CHECKING

from hookd.errors import ControlError, HookdError
from hookd.tool.attach import py_spy
from hookd.tool.attach.control import Control
from hookd.tool.attach.discover import open_page
from hookd.tool.attach.payload import SOURCE_ROOT
from hookd.tool.linux import proc
from hookd.wire.module_names import names_above
from hookd.wire.page import STEP_RECORD

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hookd.wire.page import Heartbeat, PageReader, Snapshot
    from hookd.wire.stack import Beat, Frame, Kernel, Stack, StackedThread, Stacks, Way

AGENT_S = 2.0
"""Timeout of the agent: its thread needs the GIL for a millisecond."""
RECENT = 1000
"""Number of the newest recorder events that are searched first for the end of a step."""
WATCH_S = 0.5
"""How long the heartbeats are watched for changes."""
MOST_TASKS = 1024
"""Limit on the threads of a process in another pid namespace whose tids are translated."""
STATES = {"R": "running", "S": "asleep", "D": "in an uninterruptible wait", "T": "stopped", "t": "traced",
          "Z": "ended", "X": "ended", "I": "asleep"}  # fmt: skip


def stack(pid: int, *, with_native: bool = False, blocking: bool = False) -> Stacks:
    """Return where each thread of a target is.

    Args:
        pid: of the target.
        with_native: include frames of C and C++, by py-spy; the process is stopped meanwhile.
        blocking: let py-spy stop the process instead of reading while it runs.

    Raises:
        HookdError: the process does not exist or has no agent, or its page cannot be read; reason "died": it ended meanwhile.
    """
    ticks, state = proc.start_ticks(pid), proc.status(pid).state
    with contextlib.closing(open_page(pid)) as reader:
        page, last_step_s = reader.read(), _last_step_s(reader)
        began, beats = time.monotonic(), reader.heartbeats()  # as close as possible to the reading of the stacks
        frames, ways = _stacks(pid, state, with_native=with_native, blocking=blocking)
        time.sleep(max(0.0, began + WATCH_S - time.monotonic()))
        watched_s, after = time.monotonic() - began, {beat.tid: beat for beat in reader.heartbeats()}
    beats = [beat for beat in beats if beat.name != "hookd"]  # hookd's own thread, which evaluates expressions
    described = {beat.tid: _beat(beat, after.get(beat.tid), page) for beat in beats}
    stacks: Stacks = {
        "pid": pid,
        "identity": page.identity,
        "state": STATES.get(state, state),
        "last_step_s": last_step_s,
        "watched_s": watched_s,
        "ways": ways,
        "threads": _joined(pid, described, {beat.tid: beat.name for beat in beats}, frames),
    }
    proc.require_same(pid, ticks)  # everything was read by pid, which may be another user's process by now
    return stacks


def _last_step_s(reader: PageReader) -> float | None:
    """Return the seconds since the last step ended, None if there was none."""
    # The recorder is long, and the end of the last step is rarely far back: search the newest part first.
    for look in (functools.partial(reader.recent, RECENT), reader.records):
        ends = [record.when for record in look() if record.kind == STEP_RECORD]
        if ends:
            return max(0.0, time.time() - max(ends))
    return None


# -- the page


def _beat(beat: Heartbeat, after: Heartbeat | None, page: Snapshot) -> Beat:
    module = page.modules.get(beat.module)
    name = module.name if module is not None else None
    return {
        "phase": beat.phase,
        "module": name,
        "type": module.type if module is not None else None,
        "modules": _path(name, {entry.name for entry in page.modules.values()}) if name is not None else [],
        "step": beat.step,
        "moves": beat != after,
    }


def _path(name: str, known: set[str]) -> list[str]:
    """Return the names of a module's known ancestors, from the root on, and its own name."""
    return [ancestor for ancestor in reversed(names_above(name)) if ancestor in known] + [name]


# -- the stacks


def _stacks(pid: int, state: str, *, with_native: bool, blocking: bool) -> tuple[list[Stack], dict[str, Way]]:
    """Return the Python stacks, and the native ones if requested, and the way in which each was read."""
    ways: dict[str, Way] = {"page": {"by": "heartbeats", "problem": "", "seconds": None}}
    stacks: list[Stack] = []
    began = time.monotonic()
    try:
        stacks = [] if blocking else _of_agent(pid, state)
        ways["python"] = _way(None if blocking else "agent", "", began)
    except HookdError as error:
        ways["python"] = _way(None, error.message, began)
    if stacks and not with_native:
        return stacks, ways
    if with_native and state in "Tt":  # py-spy 0.4.3: "unexpected waitpid result"
        ways["native"] = _way(None, f"process {pid} is {STATES[state]}, and py-spy cannot trace it", began)
        with_native = blocking = False
        if stacks:
            return stacks, ways
    try:
        dumped = py_spy.dump(pid, native=with_native, blocking=blocking)
    except HookdError as error:
        reason = f"{error.message} ({error.hint})" if error.hint else error.message
        if with_native:
            ways["native"] = _way(None, reason, began)
        if not stacks:
            problem = "; ".join(filter(None, (ways["python"]["problem"], reason)))
            ways["python"] = _way(None, problem, began)
        return stacks, ways
    by = "py-spy" if with_native or blocking else "py-spy, non-blocking"
    if with_native:
        ways["native"] = _way(by, "", began)
    ways["python"] = _way(by, ways["python"]["problem"], began)
    return _marked(dumped), ways


def _way(by: str | None, problem: str, began: float) -> Way:
    return {"by": by, "problem": problem, "seconds": round(time.monotonic() - began, 3)}


def _of_agent(pid: int, state: str) -> list[Stack]:
    """Return the stacks as the agent reports them.

    Raises:
        HookdError: it does not answer.
    """
    if state in "Tt":
        raise ControlError(f"process {pid} is {STATES[state]}, and so is its agent", reason="stopped")
    try:
        with Control.connect(pid, AGENT_S) as control:
            answer = control.request("stack", timeout_s=AGENT_S)
    except ControlError as error:
        if error.reason != "gone":
            raise
        text = f"the agent has not answered within {AGENT_S:g} s: the GIL is held, or the agent is leaving"
        raise ControlError(text, reason="timeout") from error
    return [*_checked(answer.get("threads"))]


def _checked(threads: object) -> Iterator[Stack]:
    """Yield the threads of the agent's answer that have the expected format."""
    for thread in threads if isinstance(threads, list) else ():
        if not isinstance(thread, dict) or not isinstance(thread.get("frames"), list):
            continue
        frames: list[Frame] = [
            {
                "function": str(frame.get("function")),
                "file": str(frame.get("file")),
                "line": _number(frame.get("line")),
                "own": frame.get("own") is True,
                "native": False,
            }
            for frame in thread["frames"]
            if isinstance(frame, dict)
        ]
        name, left_out = str(thread.get("name")), _number(thread.get("left_out"))
        yield {"tid": _number(thread.get("tid")) or None, "name": name, "frames": frames, "left_out": left_out}


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53 else 0


def _marked(threads: list[Stack]) -> list[Stack]:
    """Mark hookd's own frames in py-spy's result, and leave out hookd's own threads."""
    for thread in threads:
        for frame in thread["frames"]:
            frame["own"] = _is_own(frame["file"])
    return [thread for thread in threads if thread["name"] != "hookd"]


def _is_own(file: str) -> bool:
    return file.startswith((SOURCE_ROOT, "<hookd")) or "/hookd/target/" in file


# -- together


def _joined(pid: int, beats: Mapping[int, Beat], names: Mapping[int, str], stacks: list[Stack]) -> list[StackedThread]:
    """Return a row for each thread with a heartbeat or a stack: main thread first, then those that call modules."""
    outside = _outside_tids(pid)
    inside = {host: tid for tid, host in outside.items()}
    main = inside.get(pid, pid)
    tasks = _tasks(pid)
    rows: list[Stack] = []
    for thread in stacks:
        tid = thread["tid"]
        if tid is not None and tid not in beats:
            tid = inside.get(tid, tid)
        # py-spy reads the tid from the interpreter: in a forked child the main thread has its parent's (CPython before 3.13).
        if tid and outside.get(tid, tid) not in tasks and all(other["tid"] != main for other in stacks):
            tid = main
        name = thread["name"] or ("" if tid is None else names.get(tid, ""))
        rows.append({"tid": tid, "name": name, "frames": thread["frames"], "left_out": thread["left_out"]})
    with_stack = {row["tid"] for row in rows}
    rows += [{"tid": tid, "name": names[tid], "frames": [], "left_out": 0} for tid in beats if tid not in with_stack]
    threads: list[StackedThread] = [
        {**row, "beat": None, "kernel": None}
        if row["tid"] is None
        else {**row, "beat": beats.get(row["tid"]), "kernel": _kernel(pid, outside.get(row["tid"], row["tid"]))}
        for row in rows
    ]
    threads = [thread for thread in threads if thread["kernel"] is not None or thread["frames"]]
    return sorted(threads, key=lambda row: (row["tid"] != main, row["beat"] is None, row["tid"] or 0))


def _outside_tids(pid: int) -> dict[int, int]:
    """Return our tids of a process's threads by its own tids; empty if it is in our pid namespace."""
    if len(_nested(pid, "status")) < 2:
        return {}
    tids: dict[int, int] = {}
    for task in sorted(_tasks(pid))[:MOST_TASKS]:
        numbers = _nested(pid, f"task/{task}/status")
        if len(numbers) > 1:
            tids[numbers[-1]] = numbers[0]
    return tids


def _tasks(pid: int) -> set[int]:
    with contextlib.suppress(OSError):
        return {int(task) for task in os.listdir(f"/proc/{pid}/task")}  # noqa: PTH208 - names
    return set()


def _nested(pid: int, name: str) -> list[int]:
    """Return the ids of a task in all pid namespaces, ours first."""
    with contextlib.suppress(OSError, HookdError):
        for line in proc.read(pid, name).splitlines():
            if line.startswith(b"NSpid:"):
                return [int(word) for word in line.split()[1:]]
    return []


def _kernel(pid: int, tid: int) -> Kernel | None:
    """Return the kernel's state of a thread, None if there is none."""
    if not tid:
        return None
    try:
        state = proc.read(pid, f"task/{tid}/stat").rpartition(b")")[2].split()[0].decode()
    except (OSError, HookdError, IndexError):
        return None
    where = ""
    with contextlib.suppress(OSError, HookdError):
        where = proc.read(pid, f"task/{tid}/wchan").decode(errors="replace").strip("\0\n")
    return {"state": STATES.get(state, state), "where": "" if where == "0" else where}
