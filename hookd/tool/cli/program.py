"""A process of `hookd demo`, whose output is written to files and read from there."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time
from typing import TYPE_CHECKING, cast

from hookd.errors import HookdError
from hookd.tool.cli import output

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import TypeVar

    from hookd.tool.cli.outputs import Attaches

    T = TypeVar("T")

PATIENCE_S = 180.0
"""Longest wait without new output. Importing torch takes a minute on a busy machine, so this is far longer."""
LONGEST_S = 1800.0
"""Longest wait in total, even if output keeps coming."""
TELL_S = 15.0
"""Interval of the messages that say what the demo is waiting for."""


class Program:
    """A running process.

    Args:
        words: the command line.
        base: stdout is written to `base`.out, stderr to `base`.err.
        variables: environment variables, added to ours.
    """

    def __init__(self, words: Sequence[str], base: Path, variables: Mapping[str, str]) -> None:
        self._out, self._err = base.with_suffix(".out"), base.with_suffix(".err")
        with self._out.open("wb") as out, self._err.open("wb") as err:
            # Not in the current directory: `python -m` imports from it first, and others may be able to write there.
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, **variables},
                cwd=base.parent,
            )
        self.pid = self._process.pid

    def signal(self, number: int) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def wait(self, what: str) -> int:
        """Wait for the process to end, and return its exit status; messages call this `what`."""
        return until(self._process.poll, what)

    def lines(self) -> list[str]:
        """Return the complete lines of stdout so far."""
        return [line[:-1] for line in self._out.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def line(self, pattern: str, what: str) -> re.Match[str]:
        """Return the match of the first line of stdout that matches; messages call it `what`."""

        def search() -> re.Match[str] | None:
            return next(filter(None, (re.search(pattern, line) for line in self.lines())), None)

        return self._until(search, what)

    def more_lines(self, count: int) -> str:
        """Wait for `count` more lines of stdout, and return the last one."""
        goal = len(self.lines()) + count
        return self._until(lambda: self.lines() if len(self.lines()) >= goal else None, f"{count} more steps")[-1]

    def answer(self) -> Attaches:
        """Wait until stdout is the complete answer of `hookd attach --json`, and return it."""

        def parse() -> Attaches | None:
            with contextlib.suppress(json.JSONDecodeError):
                return cast("Attaches", dict(json.loads(self._out.read_text())))
            return None

        return self._until(parse, "the answer of `hookd attach`")

    def _until(self, condition: Callable[[], T | None], what: str) -> T:
        def watched() -> T | None:
            has_ended = self._process.poll() is not None
            result = condition()  # checked after the poll: the last output may have satisfied it
            require(result is not None or not has_ended, f"{what} from a process that ended: {self._err.read_text()}")
            return result

        return until(watched, what, self.lines)

    def end(self) -> None:
        """Terminate the process if it still runs, and wait for it."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


@contextlib.contextmanager
def started(words: Sequence[str], base: Path, **variables: str) -> Iterator[Program]:
    """Run a process in a context, and end it on exit."""
    program = Program(words, base, variables)
    try:
        yield program
    finally:
        program.end()


def until(condition: Callable[[], T | None], what: str, lines: Callable[[], list[str]] = list) -> T:
    """Wait until a condition returns something other than None, and return that.

    Every `TELL_S` a message says what the wait is for.

    Args:
        condition: called repeatedly.
        what: names the awaited thing in messages.
        lines: returns the output of the process that works on it. While it grows, the process is slow, not stuck.

    Raises:
        HookdError: it takes too long.
    """
    began = moved = reported = time.monotonic()
    count = 0
    while (found := condition()) is None:
        now, printed = time.monotonic(), lines()
        if len(printed) > count:
            count, moved = len(printed), now
        if now - moved > PATIENCE_S or now - began > LONGEST_S:
            raise _gave_up(what, now - began)
        if now - reported > TELL_S:
            reported = now
            output.say(f"   (slow: waiting for {what} for {now - began:.0f} s{_where(printed)})")
        time.sleep(0.02)
    return found


def _where(printed: list[str]) -> str:
    return f", now at '{output.shorten(printed[-1], 40)}'" if printed else ""


def _gave_up(what: str, waited_s: float) -> HookdError:
    return HookdError(
        f"the demo gave up after waiting {waited_s:.0f} s for {what}", reason="demo",
        hint="If the machine is busy, try again later. `hookd doctor` checks for other causes.",
    )  # fmt: skip


def require(is_so: bool, what: str) -> None:
    """Raise if the demo did not do what it should.

    Raises:
        HookdError: the condition is false.
    """
    if not is_so:
        raise HookdError(f"the demo failed; expected: {what}", reason="demo", hint="`hookd doctor` may find the cause.")
