"""Attacks on an attach by its target: root's writes led into a set-user-ID program, root's priority used up."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import signal
import statistics
import struct
import subprocess
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

from hookd.errors import HookdError
from hookd.tool.attach import AttachRequest, attach
from tests.attacks.attack import ATTACKER, VICTIM, Impossible, Result, attack
from tests.attacks.people import start_as
from tests.support.daemon import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self

PROGRAMS = Path(__file__).parent / "programs"
REGION, SIZE, LOOP = 0x2000_0000, 0x40_0000, 0x3000_0000
"""Where the set-user-ID program has memory, and code that it does not run by itself."""
NOT_ROOT, REACHED = 3, 7
"""Exit statuses of the set-user-ID program."""
AT_ONCE = 4
FAKES, WINDOW_S = 6, 6.0
MOST_THEFT = 0.05


@contextlib.contextmanager
def programs() -> Iterator[tuple[Path, Path, Path]]:
    """Build the fake, a file that poses as torch, and the set-user-ID program, in a file system that allows such programs."""
    if platform.machine() != "x86_64":
        raise Impossible("the fake is written for x86_64")
    with tempfile.TemporaryDirectory(dir="/run", prefix="attack-") as name:
        fake, torch, victim = (Path(name, one) for one in ("libc-python3.11", "libtorch_fake.so", "victim"))
        places = [f"-DREGION={REGION:#x}UL", f"-DSIZE={SIZE:#x}UL", f"-Wl,--section-start=.loop={LOOP:#x}"]
        _compile("fake.c", fake, *places, "-rdynamic")
        _compile("victim.c", victim, *places, f"-Wl,--section-start=.region={REGION:#x}", "-static")
        victim.chmod(0o4755)
        torch.write_bytes(bytes(4096))
        Path(name).chmod(0o755)
        yield fake, torch, victim


def _compile(source: str, made: Path, *options: str) -> None:
    command = ["cc", "-O1", "-no-pie", *options, "-o", str(made), str(PROGRAMS / source)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    except FileNotFoundError as exc:
        raise Impossible("there is no C compiler") from exc


def _try(command: list[str | Path], timeout_s: float) -> tuple[int, str]:
    """Attach as root to a fake that becomes the set-user-ID program; return the fake's exit status, and what hookd said."""
    with start_as(ATTACKER, command) as fake:
        fake.expect("^ready$")
        try:
            attach(fake.pid, AttachRequest(plugins=(), timeout_s=timeout_s))
            said = "attached"
        except HookdError as exc:
            said = exc.reason
        fake.signal(signal.SIGTERM)
        return fake.wait(), said


def _race(modes: tuple[str, ...], delays_us: tuple[int, ...], tries: int, timeout_s: float) -> Result:
    with programs() as (fake, torch, victim), ThreadPoolExecutor(AT_ONCE) as pool:
        kinds = itertools.islice(itertools.cycle(itertools.product(delays_us, modes)), tries)
        commands = [[fake, mode, torch, victim, str(delay)] for delay, mode in kinds]
        found = list(pool.map(lambda command: _try(command, timeout_s), commands))
    if any(end == NOT_ROOT for end, _ in found):
        raise Impossible("set-user-ID programs run as whoever starts them here")
    said = ", ".join(f"{reason} {count}" for reason, count in Counter(reason for _, reason in found).most_common())
    reached = Counter(command[1] for command, (end, _) in zip(commands, found, strict=True) if end == REACHED)
    through = ", ".join(f"{mode} {count}" for mode, count in reached.items()) or "none"
    return Result(tries, reached.total(), f"bytes in the program's memory or registers: {through}; hookd said {said}")


@attack(
    "a target",
    "Claim the mailbox at an address of its choice and become a set-user-ID program, which has memory there",
    tries=2000, short=40,
    is_long=True,
)  # fmt: skip
def setuid_mailbox(tries: int) -> Result:
    return _race(("asked", "steered"), (0, -1, 50, 200, 500, 1000, 3000), tries, timeout_s=0.5)


@attack("a target", "Become a set-user-ID program inside the function that hookd calls in a stop", tries=200, short=10)
def setuid_in_a_call(tries: int) -> Result:
    return _race(("inside", "aside"), (0,), tries, timeout_s=0.5)


@attack(
    "a target",
    "Six fakes keep hookd busy inside the function that it calls, by system calls or computing, to take the processors from others",
    tries=6, short=1,
    is_long=True,
)  # fmt: skip
def spin(tries: int) -> Result:
    with programs() as (fake, torch, _), tempfile.TemporaryDirectory(dir="/run") as place, _Normal(place) as loop:
        daemon = Daemon(Path(place), HOOKD_SCAN_S="1", HOOKD_POLL_S="1")
        windows = []
        with daemon.process:
            for number in range(tries):
                modes = ("refuse", ("spin", "compute")[number % 2])
                windows.append([loop.measure(daemon), *(_beside([fake, mode, torch], loop, daemon) for mode in modes)])
    thefts = [attacked.share - free.share for free, _, attacked in windows]
    against_none, against_refusing = (
        statistics.median(one[2].steps / one[beside].steps for one in windows) for beside in (0, 1)
    )
    seen = (
        f"in the {WINDOW_S:g} s of their first tries hookd took at most {max(one[2].share for one in windows):.1%} of the "
        f"processors, {max(thefts):.1%} more than with nobody there; a normal loop made {against_none:.2f} times the steps that "
        f"it made with nobody there ({against_refusing:.2f} times those beside six that refuse), and waited at most "
        f"{max(one[2].gap_ms for one in windows):.0f} ms for a processor ({max(one[0].gap_ms for one in windows):.0f} ms)"
    )
    return Result(tries, sum(theft >= MOST_THEFT for theft in thefts), seen)


def _beside(command: list[str | Path], loop: _Normal, daemon: Daemon) -> _Window:
    """Measure the loop while a daemon attaches to new fakes."""
    with contextlib.ExitStack() as fakes:
        for _ in range(FAKES):
            fakes.enter_context(start_as(ATTACKER, command, HOOKD="1"))
        return loop.measure(daemon)


class _Window(NamedTuple):
    """Measurements of one window: steps per second of the loop, its longest gap, hookd's share of all processors."""

    steps: float
    gap_ms: float
    share: float


class _Normal:
    """A loop of another user beside the attack."""

    def __init__(self, place: str) -> None:
        self._file = Path(place, "turns")
        self._file.write_bytes(bytes(16))
        os.chown(self._file, VICTIM, VICTIM)
        Path(place).chmod(0o755)
        program = Path(place, "loop")
        _compile("loop.c", program)
        self._process = start_as(VICTIM, [program, self._file])

    def __enter__(self) -> Self:
        self._process.expect("^ready$")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.close()

    def measure(self, daemon: Daemon) -> _Window:
        """Measure the speed of the loop for a while."""
        with self._file.open("r+b") as file:
            os.pwrite(file.fileno(), bytes(8), 8)
        before, used, began = self._turns()[0], _used_s(daemon.process.pid), time.monotonic()
        time.sleep(WINDOW_S)
        took_s, (after, gap_ns) = time.monotonic() - began, self._turns()
        taken_s = _used_s(daemon.process.pid) - used
        return _Window((after - before) / took_s, gap_ns / 1e6, taken_s / took_s / len(os.sched_getaffinity(0)))

    def _turns(self) -> tuple[int, int]:
        steps, gap_ns = struct.unpack("=qq", self._file.read_bytes())
        return steps, gap_ns


def _used_s(pid: int) -> float:
    """Return the processor time of a process, of its children that it has waited for, and of those that still run."""
    used = psutil.Process(pid).cpu_times()
    total = used.user + used.system + used.children_user + used.children_system
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            times = child.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return float(total)
