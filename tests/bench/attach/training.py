"""A running `trainer.py` as a bench sees it: its steps, read from shared memory without disturbing it."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.bench.attach import trainer
from tests.support.environment import target_environment
from tests.support.processes import Process

if TYPE_CHECKING:
    from typing_extensions import Self

    from tests.support.interpreters import Interpreter


PATIENCE_S = 300.0
"""A training that shares its processor with many others starts slowly."""


class Step(NamedTuple):
    """A step of the training.

    Attributes:
        end: ns of the monotonic clock.
        length: ns, without the time in which other processes ran on the processor.
    """

    end: int
    length: int


class Training:
    """Starts a training on a Python with torch, and waits for its first steps.

    Args:
        python: the interpreter.
        arguments: for `trainer.py`.
    """

    def __init__(self, python: Interpreter, *arguments: str) -> None:
        with contextlib.ExitStack() as opened:
            home = opened.enter_context(python.directory())
            script = shutil.copy(trainer.__file__, home)
            command = [*python.command, python.inside(Path(script)), python.inside(home / "words"), *arguments]
            self.process = opened.enter_context(Process(command, env=target_environment(), cwd=home))
            self.process.expect("^ready$", timeout_s=PATIENCE_S)
            with (home / "words").open("r+b") as file:
                self._map = opened.enter_context(mmap.mmap(file.fileno(), 8 * trainer.WORDS))
            self._words = opened.enter_context(memoryview(self._map).cast("q"))
            self._opened = opened.pop_all()

    @property
    def wrong(self) -> int:
        """The number of rounds that have not repeated the first one bit by bit."""
        return self._words[trainer.WRONG]

    @property
    def steps(self) -> int:
        return self._words[trainer.STEPS]

    def taken(self) -> list[Step]:
        """Return the steps so far, without the first of each round, which loads the weights and makes an optimizer."""
        assert 2 * self.steps <= trainer.WORDS - trainer.TIMES, "more steps than there is room for"
        words = list(self._words[trainer.TIMES : trainer.TIMES + 2 * self.steps])
        ends, waited = words[::2], words[1::2]
        lengths = [b - a for a, b in itertools.pairwise(ends)]
        waits = [b - a for a, b in itertools.pairwise(waited)]
        steps = [Step(end, length - wait) for end, length, wait in zip(ends[1:], lengths, waits, strict=True)]
        return [step for number, step in enumerate(steps, 1) if number % trainer.ROUND]

    def finish(self) -> str:
        """End the training after its round; return its checksum."""
        self._words[trainer.STOP] = 1
        return self.process.finish(PATIENCE_S)[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()
