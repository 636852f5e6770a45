"""Run the tests: those that measure time after all others have ended. Run failures once more, alone.

    python -m tests.gate [OPTIONS OF PYTEST]

A test that measures time is marked `alone`: no other test runs beside it.

A test that fails among the others and passes alone is printed as `FLAKY name`. Nothing is retried before that, and at most
MAX_FLAKY tests are retried: where more have failed, it would change nothing.

Exit status: 0 if all tests passed, at most MAX_FLAKY of them at the second attempt; otherwise pytest's own, 1 for tests
that failed twice, are too many, or did not run.
"""

from __future__ import annotations

import compileall
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

COMPILED = ("hookd", "plugins", "tests/support", "tests/attacks")
"""Files that more than a thousand commands import: without bytecode each compiles them anew, which doubles its time."""
WORKERS = "4"  # on two cores: they wait for processes more than they compute
SHARED_OUT = ("--dist", "loadscope", "--no-loadscope-reorder")
MAX_FLAKY = 3
SLOWEST = 10


class Watch:
    """A pytest plugin that records what runs, has run and has failed. It is for pytest-xdist's controller, not its workers.

    Failures are printed at once, for whoever waits for the rest.

    Attributes:
        running: the tests that have begun and not ended, oldest first.
        ran: those that have ended.
        failed: those of `ran` that failed, in order; the values mean nothing.
        seconds: the duration of the tests of each file.
        missing: how many tests were collected and did not run.
    """

    def __init__(self) -> None:
        self.running: dict[str, None] = {}
        self.ran: set[str] = set()
        self.failed: dict[str, None] = {}
        self.seconds: Counter[str] = Counter()
        self.missing = 0
        self._ran_before: set[str] = set()  # in sessions before this one
        self._config: pytest.Config | None = None

    def _write(self, line: str) -> None:
        assert self._config is not None
        self._config.get_terminal_writer().line("\n" + line, flush=True)

    def pytest_configure(self, config: pytest.Config) -> None:
        """Arrange that SIGTERM, as from a time limit, prints the tests that run and ends the run."""
        self._config = config

        def stop(_number: int, _frame: object) -> None:
            for nodeid in self.running:
                self._write(f"STOPPED IN {nodeid}")
            raise KeyboardInterrupt

        signal.signal(signal.SIGTERM, stop)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.running[nodeid] = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("::")[0]] += getattr(report, "duration", 0.0)
        if report.failed and report.nodeid not in self.failed:
            self.failed[report.nodeid] = None
            self._write(f"failed: {report.nodeid}")
        if report.when not in ("setup", "call"):  # "???": its worker crashed, and reports nothing more about it
            self.pytest_runtest_logfinish(report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.running.pop(nodeid, None)
        self.ran.add(nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not session.config.option.collectonly:
            self.missing += session.testscollected - len(self.ran - self._ran_before)
            self._ran_before = set(self.ran)

    def tell_slowest(self) -> None:
        """Write which files took longest."""
        print(f"\nthe {SLOWEST} slowest files")
        for file, seconds in self.seconds.most_common(SLOWEST):
            print(f"{seconds:8.1f} s  {file}")


def passes_alone(nodeid: str) -> bool:
    """Run one test in a process of its own, whichever marks it has."""
    print(f"\nonce more, alone: {nodeid}", flush=True)
    return subprocess.run([sys.executable, "-m", "pytest", "-n", "1", "-m", "", nodeid], check=False).returncode == 0


def main(arguments: list[str]) -> int:
    """Run pytest, and run failures once more.

    Args:
        arguments: pytest's.

    Returns:
        The exit status.
    """
    # Without it each worker rewrites the assertions of all tests anew: 8 s for each, before its first test.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    for folder in COMPILED:
        compileall.compile_dir(folder, quiet=2)
    watch = Watch()
    status = int(pytest.main(["-n", WORKERS, *SHARED_OUT, "--alone", "without", *arguments], [watch]))
    has_ended = status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
    if has_ended and len(watch.failed) <= MAX_FLAKY:
        alone = [*_with_alone(arguments), *SHARED_OUT, "--alone", "only", "-n", "1"]
        status = _both(status, int(pytest.main(alone, [watch])))
    watch.tell_slowest()
    if watch.missing:
        print(f"{watch.missing} of the tests that were collected did not run")
        return status or 1
    if status != pytest.ExitCode.TESTS_FAILED or len(watch.failed) > MAX_FLAKY:
        return status
    flaky = [nodeid for nodeid in watch.failed if passes_alone(nodeid)]
    print()
    for nodeid in watch.failed:
        print(f"{'FLAKY' if nodeid in flaky else 'FAILED TWICE'} {nodeid}")
    return 0 if len(flaky) == len(watch.failed) else 1


def _with_alone(arguments: list[str]) -> list[str]:
    """Add the files that have tests marked `alone`, if no file is named: collecting all takes longer than running these."""
    if any(Path(argument.partition("::")[0]).exists() for argument in arguments):
        return arguments
    return [
        *arguments,
        *(str(path) for path in sorted(Path("tests").rglob("test_*.py")) if "mark.alone" in path.read_text()),
    ]


def _both(first: int, second: int) -> int:
    """Return the exit status of two sessions together; that one of them had no tests means nothing."""
    reported = [status for status in (first, second) if status != pytest.ExitCode.NO_TESTS_COLLECTED]
    return max(reported, default=pytest.ExitCode.NO_TESTS_COLLECTED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
