"""Sample the positions of a target's threads from its page.

Nothing runs in the target for it. Blocking.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hookd.errors import ControlError, NoSuchTarget
from hookd.tool.attach import discover
from hookd.tool.linux import permission
from hookd.wire.module_names import names_above
from hookd.wire.page import PageReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from hookd.wire.page.snapshot import ModuleEntry

Stack = tuple[str, ...]
Position = tuple[str, int]
"""A phase and the id of a module, 0 for none."""
NEVER_CALLED = ("ModuleList", "ModuleDict", "ParameterList", "ParameterDict")
"""Containers of modules, which are never called and so have no frame."""
_JUMP = 1000
_CHECK_S = 0.2
"""Interval at which the sampler checks that the target still lives."""


@dataclass
class Track:
    """The samples of one thread.

    Attributes:
        name: that the program gave it.
        tid: in the target's pid namespace.
        spans: its positions and the seconds in each, in order; equal neighbours are merged.
    """

    name: str
    tid: int
    spans: list[tuple[Position, float]] = field(default_factory=list)

    def add(self, position: Position, seconds: float) -> None:
        """Add time in a position."""
        if self.spans and self.spans[-1][0] == position:
            seconds += self.spans.pop()[1]
        self.spans.append((position, seconds))

    @property
    def is_idle(self) -> bool:
        """Whether the thread was never seen in a module or in a phase."""
        return all(position == ("other", 0) for position, _ in self.spans)


@dataclass(frozen=True)
class Recording:
    """The result of sampling.

    Attributes:
        tracks: of all threads that call modules; threads that did not do so meanwhile are left out, unless none did.
        modules: by the ids in the tracks.
        seconds: from the first sample to the last.
        samples: their number.
        longest_gap_s: between two samples: shorter events may be missing.
        steps: that were completed meanwhile.
        ended: whether the target ended, or its agent was detached, before the time was over.
    """

    tracks: list[Track]
    modules: Mapping[int, ModuleEntry]
    seconds: float
    samples: int
    longest_gap_s: float
    steps: int
    ended: bool

    def stacks(self, track: Track) -> Iterator[tuple[Stack, float]]:
        """Yield the positions of a thread as frames, outermost first: its phase, then the modules from the root inward."""
        known = {(module.root, module.name): module for module in self.modules.values()}
        made: dict[Position, Stack] = {}
        for position, seconds in track.spans:
            if position not in made:
                made[position] = (position[0], *_frames(self.modules.get(position[1]), known))
            yield made[position], seconds


def _frames(module: ModuleEntry | None, known: Mapping[tuple[int, str], ModuleEntry]) -> Iterator[str]:
    """Yield the names and classes of a module and those that contain it, root first."""
    if module is None:
        return
    for name in (*reversed(names_above(module.name)), module.name):
        ancestor = known.get((module.root, name))
        if ancestor is not None and (ancestor is module or ancestor.type not in NEVER_CALLED):
            yield f"{ancestor.name} ({ancestor.type})"


def sample(
    pid: int, *, rate_hz: float, seconds: float | None, steps: int | None, timeout_s: float,
    clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep,
) -> Recording:  # fmt: skip
    """Sample the page of process `pid` for a time or for a number of steps.

    Args:
        pid: of the target.
        rate_hz: samples per second.
        seconds: duration; not with `steps`.
        steps: number of steps; from the end of one step to the end of another.
        timeout_s: of the steps.
        clock: monotonic seconds.
        sleep: waits for a number of seconds.

    Raises:
        NoSuchTarget: reason "not-attached", or no such process.
        ControlError: reason "timeout": the steps were not completed in time.
        PermissionDenied: its page cannot be seen.
    """
    with _page(pid) as (reader, lives):
        samples = _Samples(reader, clock, from_a_step=steps is not None)
        ended, stop = False, clock() + (seconds if seconds is not None else timeout_s)
        due = looked = clock()
        while True:
            now = samples.sample()
            if ended or now >= stop or (steps is not None and samples.steps >= steps):
                break
            if now - looked >= _CHECK_S:
                looked, ended = now, not lives()
            due = max(due + 1 / rate_hz, now)  # missed samples are not made up for
            sleep(due - now)
        if steps is not None and samples.steps < steps and not ended:
            raise ControlError(
                f"process {pid} has done {samples.steps} of {steps} steps within {timeout_s:g} s", reason="timeout",
                hint="See --timeout; or record for a time, with --seconds.",
            )  # fmt: skip
        return samples.recording(ended=ended)


class _Samples:
    """The samples so far.

    Attributes:
        steps: completed since the first sample. With `from_a_step` all counts begin at the first step whose end was seen.
    """

    def __init__(self, reader: PageReader, clock: Callable[[], float], *, from_a_step: bool) -> None:
        self._reader, self._clock, self._waits = reader, clock, from_a_step
        self._modules = dict(reader.read().modules)
        self._positions: dict[tuple[int, str], Position] = {}
        self._step = -1
        self._begin(clock())

    def _begin(self, now: float) -> None:
        self._tracks: dict[tuple[int, str], Track] = {}
        self._begun = self._last = now
        self._samples, self._gap_s, self.steps = 0, 0.0, 0

    def sample(self) -> float:
        """Take one sample and return its time; each thread is assumed to have stayed in its last position."""
        beats, now = self._reader.heartbeats(), self._clock()
        for (tid, name), position in self._positions.items():
            self._tracks.setdefault((tid, name), Track(name, tid)).add(position, now - self._last)
        self._positions = {(beat.tid, beat.name): (beat.phase, beat.module) for beat in beats}
        self._samples, self._gap_s, self._last = self._samples + 1, max(self._gap_s, now - self._last), now
        self._count(max((beat.step for beat in beats), default=0), now)
        return now

    def _count(self, step: int, now: float) -> None:
        before, self._step = self._step, step
        if before < 0 or step == before:
            return
        if self._waits:
            self._waits = False
            self._begin(now)
        else:  # a large jump counts as one step: the target has found out how many steps it had done before the attach
            self.steps += step - before if before and 0 < step - before < _JUMP else 1

    def recording(self, *, ended: bool) -> Recording:
        """Return the result."""
        modules = {**self._modules, **self._reader.read().modules}
        used = [track for track in self._tracks.values() if not track.is_idle]
        return Recording(
            used or list(self._tracks.values()), modules, self._last - self._begun, self._samples, self._gap_s, self.steps,
            ended,
        )  # fmt: skip


@contextlib.contextmanager
def _page(pid: int) -> Iterator[tuple[PageReader, Callable[[], bool]]]:
    """Yield the page of a target, and a function: whether the target lives and has its agent."""
    try:
        fd, process = discover.find_page(pid), os.pidfd_open(pid)
    except PermissionError as exc:
        raise permission.explain(pid, exc) from exc
    except ProcessLookupError as exc:
        raise NoSuchTarget(f"there is no process {pid}", hint="`hookd ps` lists training processes.") from exc
    try:
        if fd is None:
            raise NoSuchTarget(f"no agent in process {pid}", reason="not-attached", hint=f"Run `hookd attach {pid}`.")
        end = select.poll()
        end.register(process, select.POLLIN)
        with contextlib.closing(PageReader(fd)) as reader:
            yield reader, lambda: not end.poll(0) and reader.state() == "running"
    finally:
        os.close(process)
