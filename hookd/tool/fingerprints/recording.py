"""Receive a target's fingerprint and write its file. Blocking."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hookd.errors import HookdError
from hookd.tool.attach import AttachRequest, Control, attach, detach, discover
from hookd.tool.attach.change import change
from hookd.tool.config import PluginSpec
from hookd.tool.fingerprints.file import About, Writer
from hookd.tool.fingerprints.steps import Decoder, Step
from hookd.tool.linux import permission, proc
from hookd.wire.stream import DATA, StreamReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from hookd.tool.attach.request import AttachResult

NAME = "fingerprint"
MEMORY = DATA + (16 << 20)
"""Bytes of the stream: room for some seconds of a large model's steps."""
POLL_S, LOOK_S = 0.1, 1.0
"""Intervals at which records are read, and at which is checked whether the agent is still there."""
MOST_LOST = 1 << 32
"""A larger number of lost steps was not written by hookd."""
_F_ADD_SEALS, _SHRINK, _GROW, _SEAL = 1033, 2, 4, 1  # linux/fcntl.h


@dataclass(frozen=True)
class Recorded:
    """The result of a recording.

    Attributes:
        first, last: numbers of the first and the last step; 0 if there are none.
        steps: number of steps in the file.
        lost: steps that were not read in time.
        unread: largest number of tensors of a step that could not be read.
        bytes: size of the file.
        is_ended: whether the process ended meanwhile.
        is_detached: whether hookd was detached from it meanwhile.
    """

    first: int
    last: int
    steps: int
    lost: int
    unread: int
    bytes: int
    is_ended: bool
    is_detached: bool


def record(
    pid: int, path: Path, options: Mapping[str, str], *, steps: int | None, max_bytes: int, timeout_s: float,
    began: Callable[[AttachResult], None], is_over: Callable[[int], bool],
) -> Recorded:  # fmt: skip
    """Record the fingerprint of process `pid` until `steps` are in the file, it ends, or `is_over` returns True.

    An agent that was there before stays as it was; another one leaves at the end.

    Args:
        pid: of the process.
        path: of the file, which must not exist.
        options: of the plugin.
        steps: number of steps; None for no limit.
        max_bytes: largest size of the file.
        timeout_s: of the attach.
        began: called once the recording has begun.
        is_over: called again and again, with the number of steps in the file.

    Raises:
        HookdError: the attach fails, or the file cannot be written; the process continues as before.
    """
    with (
        stream() as (reader, number),
        _attached(pid, options, timeout_s, number) as result,
        Writer(path, about(pid, result.identity, options), max_bytes) as writer,
    ):
        began(result)
        return _drain(pid, reader, writer, steps, is_over, is_whole=False)


def follow(pid: int, path: Path, *, max_bytes: int, is_over: Callable[[int], bool]) -> Recorded:
    """Record a process whose agent has the plugin from its first step on, until it ends or `is_over` returns True.

    Raises:
        HookdError: the agent is gone, or the file cannot be written.
    """
    with Control.connect(pid) as control, stream() as (reader, number):
        control.request("stream", name=NAME, fds=[number])
        identity: Mapping[str, Any] = discover.identity(pid) or {}
        loaded: Mapping[str, Any] = identity.get("plugins") or {}
        options: Mapping[str, str] = loaded.get(NAME, {}).get("options", {})
        with Writer(path, about(pid, identity, options), max_bytes) as writer:
            return _drain(pid, reader, writer, None, is_over, is_whole=True)


def about(pid: int, identity: Mapping[str, Any], options: Mapping[str, str]) -> About:
    """Return what a file says of a process."""
    rank = identity.get("rank")
    return {
        "run": str(identity.get("run", "")), "rank": rank if isinstance(rank, int) else 0, "pid": pid,
        "python": str(identity.get("python", "")), "torch": str(identity.get("torch", "")), "options": dict(options),
        "began": time.time(),
    }  # fmt: skip


def _drain(  # noqa: PLR0913
    pid: int, reader: StreamReader, writer: Writer, steps: int | None, is_over: Callable[[int], bool], *, is_whole: bool
) -> Recorded:
    received, unread, ticks = Received(writer, is_whole=is_whole), 0, proc.start_ticks(pid)
    looked_at = time.monotonic()
    while True:
        is_ended = not _lives(pid, ticks)  # first, so that what it wrote last is read below
        for data in reader.records():
            unread = max(unread, received.add(data))
            if steps is not None and writer.steps >= steps:
                break
        is_left = False
        if time.monotonic() - looked_at > LOOK_S:
            looked_at, is_left = time.monotonic(), not is_ended and not _has_agent(pid)
        if is_ended or is_left or is_over(writer.steps) or (steps is not None and writer.steps >= steps):
            received.close()
            return Recorded(
                writer.first,
                writer.last,
                writer.steps,
                min(reader.dropped, MOST_LOST),
                unread,
                writer.size,
                is_ended,
                is_left,
            )
        time.sleep(POLL_S)


class Sink(Protocol):
    """Takes the steps of a stream, such as the writer of a file."""

    def add(self, step: Step) -> object:
        """Take a step."""


class Received:
    """Writes the steps of a stream to a file.

    Args:
        writer: of the file.
        is_whole: whether the first step is whole. After an attach in the middle of a training, the first steps lack what hookd has not
            seen yet: they are left out, and the weights after the last of them are those before the first that counts.
    """

    MOST = 4
    """Steps that may be left out."""

    def __init__(self, writer: Sink, *, is_whole: bool) -> None:
        self._writer, self._decoder = writer, Decoder()
        self._left_out = self.MOST if is_whole else 0
        self._first: Step | None = None

    def add(self, record: bytes) -> int:
        """Take one record; return the number of tensors that its step could not read.

        Raises:
            HookdError: it is not a step, or the file cannot be written.
        """
        step = self._decoder.step(record)
        first, self._first = self._first, None
        if self._left_out >= self.MOST:
            self._writer.add(step)
        elif first is None:
            self._first = step
        elif first.lacks(step):
            self._left_out += 1
            self._first = step.after(first)
        else:
            self._left_out = self.MOST
            self._writer.add(first)
            self._writer.add(step)
        return step.unread

    def close(self) -> None:
        """Write a step that still waits for the next one."""
        if self._first is not None:
            self._writer.add(self._first)
            self._first = None


def _has_agent(pid: int) -> bool:
    try:
        number = discover.find_page(pid)
    except (HookdError, OSError):
        return True  # it cannot be seen now
    if number is not None:
        os.close(number)
    return number is not None


def _lives(pid: int, ticks: int) -> bool:
    try:
        return proc.start_ticks(pid) == ticks and proc.status(pid).state not in "ZX"
    except (HookdError, OSError):
        return False


@contextlib.contextmanager
def stream(size: int = MEMORY) -> Iterator[tuple[StreamReader, int]]:
    """Yield a stream and the descriptor of its memory. The memory is there from the beginning, and is charged to this process."""
    number = os.memfd_create("hookd-stream", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(number, 0, size)
        _seal(number)
        reader = StreamReader(number, size)
        with contextlib.closing(reader):
            yield reader, number
    finally:
        os.close(number)


def _seal(number: int) -> None:
    """Keep the target from truncating the memory, which would end this process by SIGBUS."""
    fcntl.fcntl(number, _F_ADD_SEALS, _SHRINK | _GROW | _SEAL)


@contextlib.contextmanager
def _attached(pid: int, options: Mapping[str, str], timeout_s: float, number: int) -> Iterator[AttachResult]:
    """Attach with the plugin, or load it into the agent that is there, have it write into a stream, and undo that at the end.

    Args:
        pid: of the process.
        options: of the plugin; those of one that is loaded already come back at the end.
        timeout_s: of the attach.
        number: the descriptor of the stream's memory.

    Raises:
        HookdError: reason "busy": another tool reads the plugin's records; nothing was changed. Others as `attach`.
    """
    spec = PluginSpec(NAME, dict(options))
    with contextlib.ExitStack() as undo:
        there = _agent_in(pid)
        before = _options_in(there)
        if there is not None and there.get("control"):
            _read(undo, pid, number)
        result = attach(pid, AttachRequest(plugins=(spec,), timeout_s=timeout_s))
        if result.method != "existing":
            undo.callback(_quietly, detach, pid, timeout_s)
            _read(undo, pid, number)
        elif NAME in result.added:
            undo.callback(_quietly, change, pid, "unload", spec)
        elif before is not None:
            undo.callback(_quietly, change, pid, "load", PluginSpec(NAME, before))
            undo.callback(_quietly, change, pid, "unload", spec)  # first: options that were not set cannot be unset
        yield result


def _agent_in(pid: int) -> Mapping[str, Any] | None:
    """Return the identity of the agent in a process; None without one.

    Raises:
        PermissionDenied: it is another user's process.
    """
    try:
        return discover.identity(pid)
    except PermissionError as exc:
        raise permission.explain(pid, exc) from exc


def _read(undo: contextlib.ExitStack, pid: int, number: int) -> None:
    """Read the plugin's records, until the end; raises "busy" if another tool does."""
    control = undo.enter_context(Control.connect(pid))
    control.request("lease", seconds=60.0)
    control.request("stream", name=NAME, fds=[number])


def _options_in(there: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Return the options of the plugin in an agent; None if it is not loaded."""
    plugins: Any = None if there is None else there.get("plugins")
    return dict(plugins[NAME].get("options", {})) if isinstance(plugins, dict) and NAME in plugins else None


def _quietly(undo: Callable[..., object], *arguments: object) -> None:
    """Undo something, unless the process has ended, or another tool has detached."""
    with contextlib.suppress(HookdError):
        undo(*arguments)
