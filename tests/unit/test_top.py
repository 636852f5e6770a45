"""The targets and modules that `hookd top` shows, and its cost: pages of this process stand for targets."""

from __future__ import annotations

import os
import time

import pytest

from hookd.tool.cli.top import node_table
from hookd.tool.cli.top.growth import Growth
from hookd.tool.cli.top.module_table import ModuleTable
from hookd.tool.cli.top.node import Node
from hookd.tool.cli.top.state import State
from hookd.tool.cli.top.target import Target
from hookd.tool.linux import proc
from hookd.tool.linux.owner import user_name
from tests.support.top import NAMES, Job, Still, on_screen, opened_state, shown


@pytest.fixture
def job(stack):
    return Job(stack)


@pytest.fixture
def opened(job):
    return opened_state(job)


def test_the_targets_of_one_user_can_be_asked_for(job):
    ours, theirs = Node(None, os.getuid()), Node(None, os.getuid() + 1)
    for node in (ours, theirs):
        node._put(job.target)
    assert job.target in ours.targets
    assert not theirs.targets


# Growth


def test_what_has_grown_is_that_of_the_last_interval_and_not_of_all_time():
    growth = Growth()
    growth.advance(10.0, 1, [100.0, 7.0], [1.0, 1.0])
    assert growth.columns == [[100.0, 7.0], [1.0, 1.0]]  # no interval yet: totals are shown
    assert growth.elapsed_s == 0
    growth.advance(12.0, 2, [103.0, 7.0], [1.0, 2.0])
    assert growth.columns == [[3.0, 0.0], [0.0, 1.0]]
    growth.advance(13.0, 3, [103.5, 9.0, 4.0], [1.0, 2.0, 3.0])  # a third counter has come, which began at 0
    assert growth.columns == [[0.5, 2.0, 4.0], [0.0, 0.0, 3.0]]
    assert growth.elapsed_s == 1.0


def test_a_reading_in_the_middle_of_a_step_begins_no_interval_until_it_is_long_over():
    growth = Growth()
    growth.advance(0.0, 1, [1.0])
    growth.advance(2.0, 2, [2.0])
    growth.advance(3.0, 2, [2.5])
    assert (growth.columns, growth.elapsed_s) == ([[1.0]], 2.0)
    assert not growth.is_stale(7.9)
    assert growth.is_stale(8.1)


def test_a_window_joins_readings():
    growth = Growth(window_s=5.0)
    for second in range(20):
        growth.advance(float(second), second, [10.0 * second])
    assert growth.elapsed_s == 5.0
    assert growth.columns == [[50.0]]


# Targets


def test_a_target_is_shown_with_its_pace(job):
    state = State(Still(job), 1.0)
    for second in range(3):
        job.step(5, seconds=0.2)
        state.refresh(100.0 + second)
    text = shown(state)
    assert text[1].split() == [
        "PID", "RUN", "RANK", "USER", "STATE", "STEP", "STEP/S", "A", "STEP", "COST", "RSS", "INC",
    ]  # fmt: skip
    first, user = text[2].split()[:3], text[2].split()[3]
    assert first == [str(os.getpid()), "train.py", "0"]
    assert user.rstrip("…") in user_name(os.getuid())
    assert text[2].split()[4:10] == ["running", "15", "5", "200", "ms", "-"]


def test_a_target_that_ends_stays_as_it_was_last(job):
    state = State(Still(job), 1.0)
    job.step(7)
    state.refresh(100.0)
    job.page.set_state("exited")
    state.refresh(101.0)
    job.page.close()
    state.refresh(102.0)
    text = shown(state)
    assert "ended" in text[2]
    assert " 7 " in text[2]
    assert "0 targets, 1 ended" in text[0]
    assert "blocks.0.attn" in "\n".join(shown(state, keys=("enter",)))


def test_a_process_that_is_another_one_now_has_ended(job):
    job.target.start -= 1
    job.target.read(1.0)
    assert job.target.state == "ended"


def test_those_that_have_ended_are_not_kept_for_ever(stack, monkeypatch):
    monkeypatch.setattr("hookd.tool.cli.top.node.KEPT", 2)
    jobs = [Job(stack, run) for run in "abcde"]
    node = Still(*jobs)
    for job in jobs[:4]:
        job.page.set_state("exited")
    node.read(1.0)
    assert [target.run for target in node.targets] == ["c", "d", "e"]


def hang(where, for_s, waits_for=()):
    return {
        "role": "waits" if waits_for else "stands",
        "waits_for": list(waits_for),
        "where": where,
        "for_s": for_s,
        "at_least": False,
    }


def served(**more):
    return {"run": "r", "rank": "0", "user": "", "script": "", "state": "attached", "reason": None, "how": None, "hang": None,
            "incidents": 0, "step": None, **more}  # fmt: skip


def test_one_that_only_the_daemon_can_read_is_shown_as_that_says():
    row = served(run="other", rank="3", step={"counted": 5, "current": 105, "is_absolute": True})
    target = Target(os.getpid(), proc.start_ticks(os.getpid()), None)
    target.row = row
    target.read(1.0)
    (shown_row,) = node_table.as_json([target])
    assert (shown_row["run"], shown_row["step"], shown_row["state"]) == ("other", 105, "attached")
    assert "only the daemon" in shown_row["message"]


def test_a_page_that_is_spoilt_is_reported_and_nothing_else_suffers(stack, job):
    other = Job(stack, run="other.py")
    os.pwrite(other.page.fd, b"\xff" * 4096, 0)
    state = State(Still(job, other), 1.0)
    state.refresh(1.0)
    text = "\n".join(shown(state))
    assert "corrupt" in text
    assert "running" in text
    shown(state, keys=("home", "enter", "escape", "down", "enter"))  # either of them


def test_what_the_daemon_says_goes_before_the_page(job):
    job.target.row = served(run="train.py~7", hang=hang("in blocks.0", 31), incidents=3)
    job.target.read(1.0)
    (row,) = node_table.as_json([job.target])
    assert (row["run"], row["state"], row["incidents"]) == ("train.py~7", "hangs", 3)
    assert row["message"] == "hangs in blocks.0 for 31 s"
    assert row["steps_per_s"] is None


def test_a_rank_that_waits_for_one_that_hangs_is_told_apart_from_it(stack):
    jobs = [Job(stack, "a.py", rank) for rank in (0, 1)]
    jobs[0].target.row = served(hang=hang("in the collectives of the backward", 29, waits_for=["1"]))
    jobs[1].target.row = served(hang=hang("in forward of fc", 31))
    state = State(Still(*jobs), 1.0)
    state.refresh(1.0)
    assert [[word for word in line.split() if word in ("waits", "hangs")] for line in shown(state)[2:4]] == [
        ["waits"],
        ["hangs"],
    ]
    rows = node_table.as_json([job.target for job in jobs])
    assert [(row["state"], row["message"]) for row in rows] == [
        ("waits", "waits in the collectives of the backward for rank 1, for 29 s"),
        ("hangs", "hangs in forward of fc for 31 s"),
    ]


def test_a_run_shows_its_ranks_in_order_and_esc_shows_all(stack):
    jobs = [Job(stack, "a.py", rank) for rank in (10, 2, 0)] + [Job(stack, "b.py")]
    state = State(Still(*jobs), 1.0, run="a.py")
    state.refresh(1.0)
    text = shown(state)
    assert [line.split()[2] for line in text[2:5]] == ["0", "2", "10"]
    assert "b.py" not in "\n".join(text)
    assert "b.py" in "\n".join(shown(state, keys=("escape",)))


def test_an_incident_is_counted_and_reported_below(job):
    job.page.incident({"kind": "eval", "message": "somebody asked", "time": 1.0})
    job.page.incident({"kind": "nan", "message": "first NaN: blocks.0 output", "time": 2.0})
    job.page.incident({"kind": "hang", "message": "it hung", "time": 3.0})
    state = State(Still(job), 1.0)
    state.refresh(1.0)
    text = shown(state)
    assert text[2].endswith(" 3")
    assert text[-2] == "first NaN: blocks.0 output"


# Modules


def test_shares_are_of_the_time_between_two_readings(opened):
    table = opened.view.table
    row = NAMES.index("blocks.0.attn")
    assert table.values["share"][row] == pytest.approx(2.5 / 4.0)
    assert table.values["forward_share"][row] == pytest.approx(0.5 / 4.0)
    assert table.values["backward_share"][row] == pytest.approx(2.0 / 4.0)
    assert table.values["self_share"][row] == pytest.approx(1.25 / 4.0)
    assert table.cell(row, "share") == "62.5%"


def test_calls_a_second_count_from_the_reading_that_was_there_when_it_was_opened(job):
    node = Still(job)
    job.call([1.0] * 8)
    node.read(100.0)
    state = State(node, 1.0, pid=os.getpid())
    job.call([1.0] * 8, calls=10)
    state.refresh(102.0)
    assert state.view.table.values["calls_per_s"][0] == 5.0


def test_a_backward_that_is_sampled_counts_for_as_many_steps_as_the_forward(job):
    table = ModuleTable()
    job.call([1.0] * 8, [2.0] * 8)
    table.take(0.0, job.target._reader.read())
    job.call([10.0] * 8, calls=10)  # ten steps, none of which was sampled
    table.take(1.0, job.target._reader.read())
    assert table.build().values["backward_share"][0] == pytest.approx(20 / 30)


def test_no_module_has_taken_more_than_the_one_that_it_is_in(job):
    """The root's call is still open at the end of the interval; those of its modules are over."""
    table = ModuleTable()
    job.call([1.0] * 8)
    table.take(0.0, job.target._reader.read())
    job.call([1.0] + [2.0] * 7)
    table.take(1.0, job.target._reader.read())
    shares = table.build().values["share"]
    assert max(shares) == shares[0] == 1.0


def test_a_modules_own_time_is_never_more_than_its_time(job):
    """Its call returned when the page was copied: its own time was added already, its time was not."""
    table = ModuleTable()
    job.call([1.0] * 8)
    table.take(0.0, job.target._reader.read())
    job.add("timing_forward_self_seconds", [5.0] * 8)
    job.call([1.0] * 8)
    table.take(1.0, job.target._reader.read())
    shares = table.build().values
    assert shares["self_share"] == shares["share"] == [1.0] * 8


def test_shares_of_a_training_that_stands_still_are_not_known(opened, job):
    for second in range(2, 9):
        opened.refresh(100.0 + second)
    assert opened.view.table.cell(0, "share") == "-"
    assert opened.view.table.cell(0, "calls_per_s") == "0"


def test_a_column_is_there_when_its_plugin_is(opened, job):
    assert "NORM" not in shown(opened)[3]
    job.add("activations_norm", [12.5] * 8, "gauge")
    job.add("memory_output_bytes", [3 << 20] * 8, "gauge")
    opened.refresh(1.0)
    text = shown(opened)
    assert {"NORM", "MEM"} <= set(text[3].split())
    assert "12.5" in text[4]
    assert "3M" in text[4]


def test_findings_are_reported_by_module(opened, job):
    job.add("nan_nonfinite", [0, 0, 0, 5.0, 2.0], where="output", kind="nan")
    job.add("nan_origin", [0, 0, 0, 1.0], "gauge", where="output", kind="nan")
    job.add("activations_finding", [0, 0, 0, 0, 0, 0, 0, 1.0], "gauge", kind="dead")
    opened.refresh(1.0)
    table = opened.view.table
    reported = dict(zip(NAMES, table.values["finding"], strict=True))
    assert reported["blocks.0.attn"] == "first NaN"
    assert reported["blocks.1"] == "NaN"
    assert reported["head"] == "dead"
    assert reported["(root)"] == ""
    assert table.styles[NAMES.index("head")] == "red"
    assert table.detail(NAMES.index("blocks.0.attn")) == "blocks.0.attn: Linear; first NaN (output)"
    assert table.detail(NAMES.index("blocks.1")) == "blocks.1: Linear; NaN (output) 2x"


def test_the_loss_is_shown_where_the_page_has_it(job):
    job.names = ["0"]
    family = job.page.family("hookd_activations_loss", "gauge", "Help.", ("backward",))
    job.page.cells[job.page.series(family, ("0",))] = 2.34567
    state = State(Still(job), 1.0)
    state.refresh(1.0)
    text = shown(state)
    assert "LOSS" in text[1]
    assert "2.35" in text[2]


# Cost


def write_lines(count):
    """Sort numbers, and write a line of each: what any program must do, on this machine."""
    return [f"{n:>8,} {n / 7:.3g}" for n in sorted(range(count), key=lambda n: n * 7919 % 20_011)]


@pytest.mark.alone
def test_a_refresh_of_ten_thousand_modules_takes_little_more_than_writing_them(stack):
    """The median processor time for reading the page, for the table (sorted, as a tree, filtered), and for the lines."""
    names = ["(root)"] + [
        f"layers.{n // 10}" if n % 10 == 0 else f"layers.{n // 10}.part{n % 10}" for n in range(9_999)
    ]
    job = Job(stack, names=names)
    for thing in ("activations_norm", "activations_grad_norm", "memory_output_bytes"):
        job.add(thing, map(float, range(10_000)), "gauge")
    job.call([1.0] * 10_000, [1.0] * 10_000)
    state = State(Still(job), 1.0)
    state.refresh(1.0)
    state.enter()

    async def story(pilot):
        for keys in ((), ("t",), ("t", "/", *"part3", "enter")):
            await pilot.press(*keys)
            spent, written = [], []
            for second in range(5):
                began = time.process_time()
                write_lines(20_000)
                written.append(time.process_time() - began)
                job.call([1.0 + n % 7 for n in range(10_000)], [2.0] * 10_000)
                began = time.process_time()
                state.refresh(10.0 + second)
                pilot.app.show()
                await pilot.pause()
                spent.append(time.process_time() - began)
            assert sorted(spent)[2] < 4 * sorted(written)[2], (keys, spent, written)

    on_screen(state, story, 120, 40)
