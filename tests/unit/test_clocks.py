"""No test sleeps, compares readings of a real clock, or only waits for a short time: on a busy machine it would fail."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.support import clocks
from tests.support.clocks import CLOCK, SHORT, SLEEP

TESTS = Path(__file__).parents[1]
CHECKED = ("unit", "integration", "plugins", "e2e", "seeds", "compat", "support")
PROGRAMS = {
    "e2e/plugins/hostile.py": "runs in trainings: one of its plugins is slow",
    "support/page_herd.py": "holders of pages, each a process that trains at a pace",
    "support/processes.py": "holds wait_until",
}
"""Files that may use real clocks, with the reason."""
REAL_TIME = {
    (
        "e2e/test_hard_places.py",
        "test_short_processes_end_as_ever_at_whatever_moment_of_their_lives_they_are_entered",
    ): ("the moment is what is varied"),
    ("e2e/test_page_web.py", "test_ten_thousand_modules_do_not_keep_a_reader_waiting"): (
        "measures how long a person waits in a browser; marked `alone`"
    ),
    (
        "integration/test_agent_metering.py",
        "test_what_a_plugin_takes_in_a_call_that_c_counts_is_not_charged_to_hookd_as_well",
    ): "C measures the same call by the same clock, however long it takes",
    ("plugins/test_timing.py", "spend"): "stands for work, whose seconds the plugin measures also in C",
    ("plugins/test_timing.py", "assert_holds"): "compares two measurements of the same work, however long it took",
    ("plugins/test_timing.py", "test_backward_that_comes_after_another_models_step_is_timed"): "the same",
    ("plugins/test_timing.py", "test_recompute_is_apart_from_forward_and_backward"): "the same",
    (
        "plugins/test_timing_phases.py",
        "Loaded.__getitem__",
    ): "works in another process, which no clock of the test reaches",
    ("plugins/test_timing_phases.py", "test_data_that_workers_load_is_waited_for"): "the same",
    ("unit/test_attach_control.py", "drip"): "sends at a pace, and without end",
    ("unit/test_top.py", "test_a_refresh_of_ten_thousand_modules_takes_little_more_than_writing_them"): (
        "compares two measurements of processor time; marked `alone`"
    ),
}
"""Functions whose subject is real time, with the reason. Each holds on a busy machine, or is marked `alone`."""


@functools.cache
def found():
    """Return the uses of real clocks in all tests, by file."""
    # What is in `reports` are trainings, not tests.
    files = [
        path for folder in CHECKED for path in sorted((TESTS / folder).rglob("*.py")) if "reports" not in path.parts
    ]
    uses = {str(path.relative_to(TESTS)): clocks.findings(path.read_text()) for path in files}
    return {file: findings for file, findings in uses.items() if findings}


def test_no_test_sleeps_compares_real_clocks_or_waits_for_a_short_time_alone():
    forbidden = [
        f"tests/{file}:{one.line}: {one.kind} in {one.function or 'the module'}"
        for file, findings in found().items()
        if file not in PROGRAMS
        for one in findings
        if (file, one.function) not in REAL_TIME
    ]
    assert not forbidden, "wait with wait_until, move a clock (docs/contributing.md):\n" + "\n".join(forbidden)


def test_every_exception_is_needed():
    used = {(file, one.function) for file, findings in found().items() for one in findings}
    assert REAL_TIME.keys() <= used
    assert PROGRAMS.keys() <= found().keys()


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (SLEEP, "import time\ntime.sleep(0.1)"),
        (SLEEP, "import time as t\ndef test():\n    t.sleep(1)"),
        (SLEEP, "from time import sleep as pause\npause(1)"),
        (SLEEP, "import asyncio\nasync def f():\n    await asyncio.sleep(0.01)"),
        (SLEEP, "from asyncio import sleep\nasync def f(x):\n    await sleep(x)"),
        (CLOCK, "import time\nassert time.monotonic() < 5"),
        (CLOCK, "import time\nbegun = time.time()\nassert time.time() - begun < 5"),
        (CLOCK, "import time\ndef test():\n    end = time.perf_counter() + 5\n    while time.perf_counter() < end:\n        pass"),
        (CLOCK, "from time import monotonic as now\ndef test():\n    took = -now()\n    took += now()\n    if took > 1:\n        raise"),
        (CLOCK, "import time\ndef took():\n    return time.thread_time()\ndef test():\n    assert took() < 5"),
        (CLOCK, "import time\ndef cost():\n    return took()\ndef took():\n    return time.time_ns()\nassert max(cost(), 1) < 5"),
        (CLOCK, "import time\ndef test():\n    ends = []\n    run(lambda: ends.append(time.monotonic()))\n    assert ends[0] > 3"),
        (CLOCK, "import time\nspent = {}\ndef spend():\n    spent[1] = time.process_time()\nassert sum(spent.values()) < 1"),
        (CLOCK, "import time\ndef test():\n    took = [time.time() for _ in range(9)]\n    assert sorted(took)[4] < 1"),
        (CLOCK, "import time\nquick = 0\nquick += time.monotonic() - 5 < 0.25"),
        (CLOCK, "import time\ndef test():\n    since = time.monotonic()\n    wait_until(lambda: time.monotonic() > since + 3)"),
        (CLOCK, "import time\nclass Job:\n    def run(self):\n        self.at = time.time()\n    def check(self):\n        assert self.at > 5"),
        (CLOCK, "import time\nclass TestA:\n    def took(self):\n        return time.time()\n    def test(self):\n        assert self.took() < 5"),
        (SHORT, "wait_until(condition, timeout_s=5)"),
        (SHORT, "processes.wait_until(condition, 5.0, 'what')"),
        (SHORT, "SHORT_S = 3\nwait_until(condition, timeout_s=SHORT_S)"),
        (SHORT, "process.expect('ready', timeout_s=10)"),
        (SHORT, "process.ask('word', 'answer', 10)"),
        (SHORT, "process.finish(30)"),
        (SHORT, "process.wait(timeout_s=30)"),
        (SHORT, "assert not event.wait(0.5)"),
        (SHORT, "thread.join(10)"),
        (SHORT, "future.result(timeout=30)"),
        (SHORT, "subprocess.run(['true'], timeout=30)"),
    ],
)  # fmt: skip
def test_a_use_of_a_real_clock_is_found(kind, source):
    assert {one.kind for one in clocks.findings(source)} == {kind}


@pytest.mark.parametrize(
    "source",
    [
        "import asyncio\nasync def f():\n    await asyncio.sleep(0)",
        "import time\nprogram = 'time.sleep(1)'",
        "import time\nstarted = time.time()\nstore.add(time.time())\nassert store.rows == 1",
        "import time\nassert client.call(until=time.monotonic() + 60) == 3",
        "import time\ndef test():\n    now = time.time()\ndef other(now):\n    assert now == 5",
        "wait_until(condition, timeout_s=120)\nprocess.finish(300)\nprocess.wait()\nevent.wait(60)\nfuture.result(0)\n', '.join(names)\nattach(timeout_s=5)",
        "clock.advance(5)\nassert clock() - begun == 5",
    ],
)
def test_what_is_no_use_of_a_real_clock_is_not_found(source):
    assert clocks.findings(source) == []


def test_a_finding_names_the_line_and_the_function():
    source = "import time\nclass TestA:\n    def test_b(self):\n        def inner():\n            time.sleep(1)\n"
    assert clocks.findings(source) == [(SLEEP, 5, "TestA.test_b")]
