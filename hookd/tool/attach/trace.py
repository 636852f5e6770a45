"""Make an agent take a trace, and fetch it. Blocking. See `hookd/target/remote/tracing.py`."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from hookd import errors
from hookd.errors import ControlError, HookdError, PageError
from hookd.tool.attach import discover
from hookd.tool.attach.control import Control, reading
from hookd.tool.linux import bounded, permission, proc, untrusted
from hookd.wire.page import PageReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import BinaryIO

    from hookd.wire.agent import TraceState

_POLL_S = 0.05
_PATIENCE_S = 60.0
"""Timeout of an answer: torch holds the GIL while it processes and writes a recording."""
_CHUNK = 1 << 20
_NO_OP = "bad-request"


@dataclass(frozen=True)
class Trace:
    """The properties of a trace.

    Attributes:
        steps: number of steps in it.
        first: number of its first step, as the target counts.
        bytes: size of the JSON.
        pause_s: how long torch's profiler blocked the training to start, to stop and to write.
        all_threads: whether it shows all threads, or only the thread that makes the steps and those of the backward.
    """

    steps: int
    first: int
    bytes: int
    pause_s: float
    all_threads: bool


def take(pid: int, steps: int, into: BinaryIO, *, timeout_s: float, max_bytes: int) -> Trace:
    """Take a trace of `steps` optimizer steps of process `pid`, and write its JSON to `into`.

    The agent discards the trace when the connection is closed, also after an error.

    Raises:
        NoSuchTarget: reason "not-attached", or no such process.
        ControlError: reasons "timeout", "too-large", "profiler" (the training uses torch's profiler), "busy", "no-room",
            "no-profiler", "profiler-failed", "gone".
        OSError: `into` cannot be written.
    """
    deadline = time.monotonic() + timeout_s
    with Control.connect(pid) as control:
        _ask(control, steps, max_bytes)
        state = _await(control, steps, deadline, timeout_s)
        with reading(pid):
            number, done, first = int(state["fd"]), int(state["steps"]), int(state["first"])
            pause_s, all_threads = float(state["pause_s"]), state["all_threads"] is True
        size = _copy(pid, number, into, max_bytes)
    return Trace(done, first, size, pause_s, all_threads)


def _ask(control: Control, steps: int, max_bytes: int) -> None:
    try:
        control.request("trace", steps=steps, max_bytes=max_bytes)
    except HookdError as exc:
        if exc.reason != _NO_OP:
            raise
        raise ControlError(
            f"the agent in process {control.pid} cannot take traces: it belongs to another version of hookd", reason="version",
            hint=f"`hookd attach {control.pid}` replaces it.",
        ) from exc  # fmt: skip


def _await(control: Control, steps: int, deadline: float, timeout_s: float) -> TraceState:
    while True:
        state = cast("TraceState", control.request("trace_state", timeout_s=_PATIENCE_S))
        if state.get("state") == "done":
            return state
        if state.get("state") == "failed":
            failure = state.get("failure")
            error: Mapping[str, object] = failure if isinstance(failure, dict) else {}
            raise errors.rebuild(
                error.get("kind"), error.get("error"), error.get("reason"), error.get("hint", ""), ControlError
            )
        if time.monotonic() > deadline:
            done, where = state.get("steps"), whereabouts(control.pid)
            raise ControlError(
                f"process {control.pid} has done {done} of {steps} steps within {timeout_s:g} s{where}; nothing is kept",
                reason="timeout", hint="A trace begins and ends where an optimizer step is done: see --timeout, --steps.",
            )  # fmt: skip
        time.sleep(_POLL_S)


def whereabouts(pid: int) -> str:
    """Describe where the threads are that call modules, for a person; "" if unknown."""
    with contextlib.suppress(HookdError, OSError, PageError):
        fd = discover.find_page(pid)
        if fd is not None:
            with contextlib.closing(PageReader(fd)) as reader:
                page = reader.read()
            places = [
                f"{beat.name} is in {page.modules[beat.module].name}, phase {beat.phase}"
                if beat.module in page.modules
                else f"{beat.name} is in phase {beat.phase}"
                for beat in page.heartbeats
                if beat.events
            ]
            return f" ({'; '.join(places[:4]) or 'no thread has called a module since the attach'})"
    return ""


def _copy(pid: int, number: int, into: BinaryIO, max_bytes: int) -> int:
    """Copy the target's file and return its size in bytes; check only that it begins and ends like a JSON object."""
    size, last = 0, b""
    for chunk in _chunks(pid, number, max_bytes):
        if not size and not chunk.lstrip().startswith(b"{"):
            break
        into.write(chunk)
        size, last = size + len(chunk), chunk
    if not last.rstrip().endswith(b"}"):
        raise ControlError(
            f"process {pid} has written an incomplete trace", reason="cut",
            hint="Its disk may be full: see its own TMPDIR and /tmp, or take fewer --steps.",
        )  # fmt: skip
    return size


def _chunks(pid: int, number: int, max_bytes: int) -> Iterator[bytes]:
    """Yield the parts of the file that the target reports as its trace.

    This process never opens it.
    """
    offset = 0
    try:
        uid = proc.status(pid).uid
        while offset < max_bytes:
            size, chunk = bounded.read_part(pid, number, uid, offset, min(_CHUNK, max_bytes - offset))
            if size > max_bytes:
                raise ControlError(
                    f"the trace has {size / 2**20:.0f} MiB, more than the limit of {max_bytes / 2**20:.0f} MiB",
                    reason="too-large", hint="Take fewer --steps, or allow more with --max-size.",
                )  # fmt: skip
            if not chunk:
                return
            yield chunk
            offset += len(chunk)
    except untrusted.UnexpectedError as exc:
        raise ControlError(f"process {pid} did not return its trace: {exc.strerror}", reason="protocol") from exc
    except OSError as exc:
        raise permission.explain(pid, exc) from exc
