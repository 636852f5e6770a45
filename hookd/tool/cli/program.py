"""A process of the demo: its output goes into files, which is where we read it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time
from typing import TYPE_CHECKING, Any

from hookd.errors import HookdError
from hookd.tool.cli import output

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import TypeVar

    T = TypeVar("T")

PATIENCE_S = 180.0
"""How long to wait for a sign of life: far longer than one takes to come; torch takes a minute to import on a busy machine."""
LONGEST_S = 1800.0
"""How long to wait for anything, whatever is printed meanwhile."""
TELL_S = 15.0
"""So often a person who waits is told for what."""


class Program:
    """A running process.

    Args:
        words: its command line.
        base: its stdout is written to `base`.out, its stderr to `base`.err.
        variables: of its environment, beside ours.
    """

    def __init__(self, words: Sequence[str], base: Path, variables: Mapping[str, str]) -> None:
        self._out, self._err = base.with_suffix(".out"), base.with_suffix(".err")
        with self._out.open("wb") as out, self._err.open("wb") as err:
            # Not where the user is: `python -m` imports from there first, and others may write there.
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
        """Wait for the end, which `what` names, and return the exit status."""
        return until(self._process.poll, what)

    def lines(self) -> list[str]:
        """Give the whole lines of stdout so far."""
        return [line[:-1] for line in self._out.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def line(self, pattern: str, what: str) -> re.Match[str]:
        """Wait for a line of stdout that matches; `what` says to a person what it is."""

        def search() -> re.Match[str] | None:
            return next(filter(None, (re.search(pattern, line) for line in self.lines())), None)

        return self._until(search, what)

    def more_lines(self, count: int) -> str:
        """Wait for `count` more lines of stdout, and give the last one."""
        goal = len(self.lines()) + count
        return self._until(lambda: self.lines() if len(self.lines()) >= goal else None, f"{count} more steps")[-1]

    def answer(self) -> dict[str, Any]:
        """Wait until stdout is a whole JSON object, and give it."""

        def parse() -> dict[str, Any] | None:
            with contextlib.suppress(json.JSONDecodeError):
                return dict(json.loads(self._out.read_text()))
            return None

        return self._until(parse, "what `hookd attach` has to say")

    def _until(self, condition: Callable[[], T | None], what: str) -> T:
        def watched() -> T | None:
            has_ended = self._process.poll() is not None
            found = condition()  # it may have said it with its last breath
            require(found is not None or not has_ended, f"{what} from a process that ended: {self._err.read_text()}")
            return found

        return until(watched, what, self.lines)

    def end(self) -> None:
        """Make sure that it does not outlive us."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


@contextlib.contextmanager
def started(words: Sequence[str], base: Path, **variables: str) -> Iterator[Program]:
    """Run a process for as long as the block."""
    program = Program(words, base, variables)
    try:
        yield program
    finally:
        program.end()


def until(condition: Callable[[], T | None], what: str, lines: Callable[[], list[str]] = list) -> T:
    """Wait until a condition gives something that is not None, and give that; say now and then what is waited for.

    Args:
        condition: asked again and again.
        what: is waited for, in words.
        lines: that are printed by who works on it. As long as more of them come it is slow, not stuck.

    Raises:
        HookdError: it takes too long.
    """
    began = moved = told = time.monotonic()
    count = 0
    while (found := condition()) is None:
        now, printed = time.monotonic(), lines()
        if len(printed) > count:
            count, moved = len(printed), now
        if now - moved > PATIENCE_S or now - began > LONGEST_S:
            raise _gave_up(what, now - began)
        if now - told > TELL_S:
            told = now
            output.say(f"   (slow: waiting for {what} since {now - began:.0f} s{_where(printed)})")
        time.sleep(0.02)
    return found


def _where(printed: list[str]) -> str:
    return f", now at '{output.shorten(printed[-1], 40)}'" if printed else ""


def _gave_up(what: str, waited_s: float) -> HookdError:
    return HookdError(
        f"the demo gave up after {waited_s:.0f} s of waiting for {what}", reason="demo",
        hint="If the machine is busy, try again when it is less so. `hookd doctor` tells what else may be in the way.",
    )  # fmt: skip


def require(is_so: bool, what: str) -> None:
    """Check that the demo goes as it should.

    Raises:
        HookdError: it does not.
    """
    if not is_so:
        raise HookdError(f"the demo failed; expected: {what}", reason="demo", hint="`hookd doctor` may know why.")
