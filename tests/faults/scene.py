"""The scene of a fault: a directory of its own, real targets, a real `hookd serve`, and a way to read what it says.

A fault is a function that is registered by `fault`. It takes a `Scene`, makes the fault with real processes, and returns
hookd's answer. If hookd is silent for too long, the table says so: it hides nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookd.errors import HookdError
from tests.support import daemon, forked, training
from tests.support.herd import Herd
from tests.support.processes import Process, wait_until
from tests.support.training import Job

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

NOTHING = "(nothing)"
PATIENCE_S = 20.0
"""How long hookd may take to say something. It takes a rank for hanging after HANG_S."""
HANG_S = 5.0
SETTINGS = {"HOOKD_POLL_S": "1", "HOOKD_SCAN_S": "1", "HOOKD_HANG_AFTER_S": str(HANG_S)}
"""Settings of the daemon: its defaults, except those of hangs."""
_STAMP = re.compile(r"^\d{4}-\d\d-\d\d [\d:,]+ hookd ")


@dataclass(frozen=True)
class Fault:
    """A row of the table before it was run.

    Attributes:
        title: what happens.
        made: how it is made: a command, or what the program does.
        play: makes it.
    """

    name: str
    title: str
    made: str
    play: Callable[[Scene], Said]


@dataclass(frozen=True)
class Said:
    """hookd's message about a fault.

    Attributes:
        words: hookd's message, verbatim; NOTHING if it was silent.
        seconds: from the fault to the message; None if there is none.
        lost: what the fault has destroyed.
    """

    words: str
    seconds: float | None
    lost: str


class Impossible(Exception):  # noqa: N818  says what is so
    """This fault cannot be made here."""


FAULTS: dict[str, Fault] = {}


def fault(title: str, made: str) -> Callable[[Callable[[Scene], Said]], Callable[[Scene], Said]]:
    """Register a function as a fault, under the function's name."""

    def register(play: Callable[[Scene], Said]) -> Callable[[Scene], Said]:
        name = play.__name__.strip("_")
        FAULTS[name] = Fault(name, title, made, play)
        return play

    return register


def run(one: Fault) -> Said:
    """Make a fault in a scene of its own."""
    with Scene() as scene:
        try:
            return one.play(scene)
        except Impossible as exc:
            return Said(f"(not made on this machine: {exc})", None, "")
        except (HookdError, AssertionError) as exc:
            traceback.print_exc()
            return Said(f"{NOTHING}: {(str(exc) or repr(exc)).splitlines()[0]}", None, "?")


@dataclass
class Target:
    """A training process that is served.

    Attributes:
        process: the process, with its stdin.
        steps: its own count and hookd's when they were last compared.
    """

    process: Process
    run: str

    @property
    def pid(self) -> int:
        return self.process.pid


@dataclass
class Scene:
    """The place of one fault. All processes started in it end with it."""

    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    daemons: list[daemon.Daemon] = field(default_factory=list)
    struck: float = 0.0

    def __enter__(self) -> Self:
        self.home = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="hookd-fault-")))
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    @property
    def daemon(self) -> daemon.Daemon:
        return self.daemons[-1]

    def serve(self, *arguments: str | Path, **more: Any) -> daemon.Daemon:
        """Start `hookd serve` on this scene's state; the next one takes over from the last. `more`: see `Daemon`."""
        started = daemon.Daemon(self.home, *arguments, **{**SETTINGS, **more})
        self.stack.callback(started.process.close)
        self.daemons.append(started)
        return started

    def train(self, *plugins: str, ranks: int = 1, attach: bool = True) -> list[Target]:
        """Start a job of one or more ranks, and attach to each unless `attached` is false."""
        targets = [self._start(rank, ranks) for rank in range(ranks)]
        for target in targets:
            target.process.expect("^ready$")
        if attach:
            self.attach(targets, *plugins)
        return targets

    def attach(self, targets: list[Target], *plugins: str) -> None:
        """Attach to each through the daemon, and wait until its steps are counted."""
        for target in targets:
            self.daemon.client.attach(target.pid, timeout_s=30, plugins=list(plugins or ("nan", "timing")))
        for target in targets:
            wait_until(lambda target=target: self.steps(target) > 20, what="steps")

    def _start(self, rank: int, ranks: int) -> Target:
        words = [str(rank), str(ranks), str(self.home / "rendezvous")] if ranks > 1 else []
        environment = {"HOOKD_RUN": "job"} | ({"RANK": str(rank), "WORLD_SIZE": str(ranks)} if ranks > 1 else {})
        command = [*Job("doomed.py").command(), *words]
        environment = training.environment(**environment)
        started = Process(command, env=environment, stdin=True, popen=forked.start)
        self.stack.callback(started.close)
        return Target(started, "job")

    def steps(self, target: Target) -> int:
        """Return the steps of a target that hookd serves."""
        info = self.daemon.metrics().select("hookd_target_info", pid=str(target.pid))
        rank = info[0].labels["rank"] if info else "0"
        return int(self.daemon.metrics().total("hookd_steps_total", run=target.run, rank=rank))

    def strike(self, target: Target, what: str) -> None:
        """Start a fault in a target."""
        self.struck = time.monotonic()
        target.process.send(what)

    def now(self) -> None:
        """Note that the fault happens now."""
        self.struck = time.monotonic()

    def hears(self, *patterns: str, lost: str, after: int = 0, process: Process | None = None) -> Said:
        """Wait for a line of the daemon's log, from line number `after` on, that matches one of the patterns."""
        process = process or self.daemon.process
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            for pattern in patterns:
                for line in process.err[after:]:
                    if re.search(pattern, line):
                        return Said(_STAMP.sub("", line), time.monotonic() - self.struck, lost)
            time.sleep(0.01)
        return Said(NOTHING, None, lost)

    def shows(self, pattern: str, *, lost: str) -> Said:
        """Wait for a line of /metrics."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            if found := re.search(f"^{pattern}.*$", self.daemon.get("/metrics"), re.MULTILINE):
                return Said(found.group(), self.elapsed(), lost)
            time.sleep(0.05)
        return Said(NOTHING, None, lost)

    def elapsed(self) -> float:
        """Return the seconds since the fault."""
        return time.monotonic() - self.struck

    def herd(self) -> Herd:
        """Return targets that cost next to nothing."""
        herd = Herd()
        self.stack.callback(herd.close)
        return herd

    def kept(self, target: Target, before: int) -> str:
        """Return what is still served of a target that has ended: at least the `before` steps, and its end."""
        wait_until(lambda: self.daemon.metrics().total("hookd_target_up", run=target.run) == 0, what="its end")
        steps = self.steps(target)
        assert steps >= before, f"{steps} steps are served after {before}"
        return f"nothing: its {steps} steps and all other counters are served for the linger time"


def root() -> None:
    """Raise Impossible unless this user is root."""
    if os.geteuid() != 0:
        raise Impossible("it needs root")
