"""Run all tests again and again under hard conditions, and print which failed and how often. It must print none.

    python -m tests.flakes [--rounds N] [--without-slow] [OPTIONS OF PYTEST]

Each round runs all tests in a random order beside one busy process per processor. The last one has no busy processes,
but a single processor and the policy SCHED_IDLE. The tests marked `alone` run in that one only, after all others.

Exit status: 0 if no test failed, 1 if one did, 2 if a round did not end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import pytest

from tests.gate import SHARED_OUT, WORKERS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROUNDS = 5
SLOW = ("chrt", "--idle", "0", "taskset", "--cpu-list", "0")


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Keep every processor busy with a process of normal priority."""
    with contextlib.ExitStack() as stack:
        for _ in range(os.cpu_count() or 1):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(process.kill)
        yield


def failures(around: Sequence[str], options: Sequence[str]) -> list[str]:
    """Run the tests once.

    Args:
        around: a command that runs another one.
        options: pytest's.

    Returns:
        The names of those that failed.

    Raises:
        ChildProcessError: pytest did not end as it does after running all tests.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [*around, sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *options]
        status = _status(command)
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
            raise ChildProcessError(f"exit status {status}: {' '.join(command)}")
        cases = ET.parse(report).iter("testcase")  # noqa: S314  written by pytest just now
        failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    return [f"{case.get('classname')}::{case.get('name')}" for case in failed]


def _status(command: Sequence[str]) -> int:
    with subprocess.Popen(command) as process:  # which waits for its end
        try:
            return process.wait()
        except SystemExit:  # SIGTERM; a Ctrl-C reaches pytest by itself
            process.send_signal(signal.SIGINT)  # it then ends what its tests have started
            raise


def _end(number: int, _frame: object) -> None:
    sys.exit(128 + number)


def main(arguments: list[str]) -> int:
    """Run the rounds and print the table.

    Args:
        arguments: ours and pytest's.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser("python -m tests.flakes", add_help=False)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--without-slow", action="store_true")
    ours, pytests = parser.parse_known_args(arguments)
    counted: Counter[str] = Counter()
    signal.signal(signal.SIGTERM, _end)
    # A shell's background commands ignore SIGINT, and pytest would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    among_others = ["-n", WORKERS, *SHARED_OUT, "--alone", "without"]
    try:
        for number in range(ours.rounds):
            seed = int(time.time()) + number
            print(f"round {number + 1} of {ours.rounds}, beside busy processes, --randomly-seed={seed}", flush=True)
            with busy():
                shuffled = ["-p", "randomly", f"--randomly-seed={seed}", "--randomly-dont-reset-seed"]
                counted.update(failures((), [*among_others, *shuffled, *pytests]))
        if not ours.without_slow:
            print("on one processor, SCHED_IDLE", flush=True)
            counted.update(failures(SLOW, [*among_others, *pytests]))
            counted.update(failures(SLOW, ["-n", "1", *SHARED_OUT, "--alone", "only", *pytests]))
    except ChildProcessError as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 2
    finally:
        print("\nfailures  test")
        for name, number in counted.most_common():
            print(f"{number:8}  {name}")
    return 1 if counted else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
