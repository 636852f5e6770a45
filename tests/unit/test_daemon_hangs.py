"""Hangs as a daemon sees them: real pages of this very process, read through real targets, with a simulated clock."""

from __future__ import annotations

import os
import random
import signal
import sys

import pytest

from hookd.tool.daemon.fleet.fleet import Fleet
from hookd.tool.daemon.fleet.targets import Target
from hookd.tool.daemon.incidents.store import IncidentStore
from hookd.tool.daemon.watch.hangs import Hangs
from hookd.tool.daemon.watch.silence import Patience, step_s
from hookd.tool.daemon.watch.verdict import RankPosition, judge, sentence
from hookd.tool.linux import proc
from hookd.wire import labels
from hookd.wire.page import EVENTS, MODULE, PHASE, PHASES, STEP, PageReader, PageWriter
from tests.support import emulated
from tests.support.processes import Process, wait_until

MODULES = ("(root)", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head")
BOUNDS = (1.0, 10.0, 30.0, 60.0, 300.0)


class Rank:
    """A rank of a job: its page, and the target that is made of it."""

    def __init__(self, clock, pid, rank, **identity):
        world = {"rank": rank, "world_size": 1, "step_offset": 0, "script": "/jobs/train.py", "run": "job"}
        self.page = PageWriter.create({"pid": pid, **world, **identity})
        self.page.set_state("running")
        self.ids = {name: self.page.module(name, "Module", 0) for name in MODULES}
        self.base = self.page.thread(pid, "MainThread")
        self.done = self.number("hookd_steps", "counter")
        self.compiling = self.number("hookd_compiling", "gauge")
        self.seconds = self.number("hookd_step_seconds", "histogram", BOUNDS)
        self.pid, self.rank, self.clock = pid, rank, clock
        self.target = self.seen()

    def seen(self):
        """Make the target that a daemon would make of it."""
        target = Target(self.pid, os.dup(self.page.fd), self.clock)
        target.claim = labels.Claim(self.pid, 1, self.rank, "job", "job")
        return target

    def number(self, name, kind, buckets=()):
        return self.page.series(self.page.family(name, kind, "Of this test.", (), buckets), ())

    def issued(self, group, count):
        family = self.page.family("hookd_collectives", "counter", "Of this test.", ("group",))
        self.page.cells[self.page.series(family, (group,))] = count

    def at(self, phase, module=None, step=None):
        """Record an event: the rank is now in this phase."""
        cells = self.page.cells
        cells[self.base + EVENTS] += 1
        cells[self.base + MODULE] = self.ids[module] if module else 0
        cells[self.base + PHASE] = PHASES.index(phase)
        if step is not None:
            cells[self.base + STEP] = step

    def steps(self, count, seconds=1.0):
        """Take steps, each of this length."""
        cells = self.page.cells
        cells[self.done] += count
        cells[self.seconds + next(n for n, bound in enumerate(BOUNDS) if seconds <= bound)] += count
        cells[self.seconds + len(BOUNDS) + 1] += count * seconds
        self.at("other", step=cells[self.done] + 1)


class Node:
    """A daemon's view of one job."""

    def __init__(self, state_dir=None):
        self.now = 1000.0
        self.state_dir = state_dir
        self.ranks = []
        self.start()

    def start(self, patience=None):
        self.fleet = Fleet(IncidentStore.open(self.state_dir), linger_s=120, only=(), clock=lambda: self.now)
        self.hangs = Hangs(self.fleet, patience or Patience(), clock=lambda: self.now)

    def restart(self):
        """Replace the daemon by a new one, which knows only the pages and the store."""
        self.fleet.store.close()
        self.start()
        for rank in self.ranks:
            rank.target.close()
            rank.target = rank.seen()
            self.fleet.catch_up(rank.target)

    def close(self):
        self.fleet.store.close()
        for rank in self.ranks:
            rank.target.close()
            rank.page.close()

    def job(self, count, *, steps=10, **identity):
        """Return ranks that have taken some steps."""
        self.ranks = [Rank(lambda: self.now, os.getpid(), str(n), world_size=count, **identity) for n in range(count)]
        for rank in self.ranks:
            if steps:
                rank.steps(steps)
        self.watch(2)
        return self.ranks

    def watch(self, seconds, every=1.0):
        """Advance the clock while nothing happens."""
        end = self.now + seconds
        while self.now < end:
            self.now += min(every, end - self.now)
            for rank in self.ranks:
                rank.target.read()
            self.hangs.poll([rank.target for rank in self.ranks])

    def reported_kinds(self):
        """Return the kinds of all incidents, in order."""
        return [row["kind"] for row in reversed(self.fleet.store.query())]

    def last(self):
        return self.fleet.store.query()[0]


@pytest.fixture
def node(tmp_path):
    made = Node(tmp_path / "state")
    yield made
    made.close()


def stall(node, step=20):
    """Stop rank 1 in a forward, and let the others wait for it in their backward."""
    for rank in node.ranks:
        rank.at("backward", step=step)
    node.ranks[1].at("forward", "blocks.2", step=step)


def test_a_rank_that_stands_is_reported_once_with_its_module_phase_and_step_and_again_when_it_goes_on(node):
    (rank,) = node.job(1)
    rank.at("forward", "blocks.2", step=20)
    node.watch(59)
    assert node.reported_kinds() == []
    node.watch(300)
    assert node.reported_kinds() == ["hang"]
    found = node.last()
    assert (found["module"], found["step"], found["detail"]["phase"]) == ("blocks.2", 20, "forward")
    assert found["message"].startswith("rank 0 stands in forward of blocks.2 (step 20) for 60 s")
    assert rank.target.hang["for_s"] == pytest.approx(359, abs=2)
    assert samples(node, rank) == {"stands": 1.0, "waits": 0.0}
    rank.at("backward")
    node.watch(50)
    assert node.reported_kinds() == ["hang", "hang_over"]
    assert node.last()["detail"]["lasted_s"] == pytest.approx(359, abs=2)
    assert samples(node, rank) == {"stands": 0.0, "waits": 0.0}
    node.watch(300)
    assert node.reported_kinds() == ["hang", "hang_over", "hang"], "it is reported again when it hangs again"
    assert rank.target.reported == {"hang": 2, "hang_over": 1}


def samples(node, rank):
    found = node.hangs.samples(rank.target)
    return {sample.labels["role"]: sample.value for sample in found if sample.family.name == "hookd_hang"}


def test_the_rank_that_is_waited_for_is_named_and_a_waiting_rank_has_no_report_of_its_own(node):
    ranks = node.job(4)
    stall(node)
    node.watch(120)
    assert node.reported_kinds() == ["hang"]
    found = node.last()
    assert (found["rank"], found["module"]) == ("1", "blocks.2")
    assert found["message"].startswith(
        "rank 1 stands in forward of blocks.2 (step 20) for 60 s; ranks 0, 2, 3 wait for it in backward (step 20)"
    )
    assert "CPU side only" in found["message"]
    assert [rank.target.hang["role"] for rank in ranks] == ["waits", "stands", "waits", "waits"]
    assert ranks[3].target.hang["waits_for"] == ["1"]
    assert samples(node, ranks[3]) == {"stands": 0.0, "waits": 1.0}


def test_when_the_rank_that_was_waited_for_goes_on_first_its_run_does_not_hang_anew(node):
    ranks = node.job(4)
    stall(node)
    node.watch(900, every=5)
    ranks[1].at("backward")
    node.watch(3)
    assert node.reported_kinds() == ["hang", "hang_over"]
    assert [rank.target.hang for rank in ranks] == [None] * 4
    for rank in ranks:
        rank.steps(1)
    node.watch(50)
    assert node.reported_kinds() == ["hang", "hang_over"]


def test_a_launcher_that_has_an_agent_of_its_own_is_not_waited_for(node):
    node.job(2)
    launcher = Rank(lambda: node.now, os.getpid(), "launcher")
    node.ranks.append(launcher)
    stall(node)
    launcher.at("other", step=0)
    node.watch(70)
    assert node.last()["rank"] == "1"


def test_numbers_of_collectives_decide_against_what_the_cpu_sides_seem_to_say(node):
    ranks = node.job(3)
    for rank, issued in zip(ranks, (412, 412, 411), strict=True):
        rank.issued("0-2", issued)
        rank.at("backward", step=20)
    ranks[0].at("forward", "blocks.0", step=20)
    node.watch(70)
    assert node.last()["rank"] == "2"
    assert "of the group of ranks 0-2, rank 2 has issued 411 collectives, rank 1 412" in node.last()["message"]
    assert node.last()["detail"]["basis"] == "collectives"


def test_a_rank_that_is_being_detached_is_neither_waited_for_nor_takes_a_hang_with_it(node):
    first, second = node.job(2)
    first.at("backward", step=11)
    second.at("forward", "blocks.1", step=11)
    second.page.set_state("detaching")
    node.watch(600)
    assert node.reported_kinds() == []
    second.page.set_state("running")
    node.watch(200)
    assert node.reported_kinds() == ["hang"]
    for rank in (first, second):
        rank.page.set_state("detaching")
    node.restart()
    node.watch(100)
    assert node.reported_kinds() == ["hang"]


def test_a_restarted_daemon_finds_the_same_hang_again_and_tells_of_it_once(node):
    ranks = node.job(2)
    stall(node)
    node.watch(90)
    node.restart()
    node.watch(200)
    assert node.reported_kinds() == ["hang"]
    assert [rank.target.hang["role"] for rank in ranks] == ["waits", "stands"]
    assert ranks[1].target.hang["at_least"]
    assert ranks[1].target.hang["for_s"] >= 200 + 60 - 2, "what was known before counts"
    ranks[1].at("backward")
    node.watch(5)
    assert node.reported_kinds() == ["hang", "hang_over"]
    assert "at least" in node.last()["message"]


def test_a_hang_that_ended_while_no_daemon_looked_is_closed_by_the_next_one(node):
    ranks = node.job(2)
    stall(node)
    node.watch(90)
    for rank in ranks:
        rank.steps(3)
    node.restart()
    node.watch(20)
    assert node.reported_kinds() == ["hang", "hang_over"]


def test_a_daemon_that_comes_into_a_hang_says_that_it_may_be_older(node):
    ranks = node.job(2)
    stall(node)
    node.restart()
    node.watch(70)
    assert "for at least 6" in node.last()["message"]
    assert ranks[1].target.hang["at_least"]


@pytest.mark.parametrize("gap", [120.0, 86400.0, -3600.0])
def test_no_time_in_which_the_daemon_did_not_look_is_held_against_a_target(node, gap):
    """It was stopped, its machine slept, or its clock was set."""
    (rank,) = node.job(1)
    rank.at("forward", "head", step=20)
    node.watch(20)
    node.now += gap
    node.watch(30)
    assert node.reported_kinds() == []
    node.watch(40)
    assert node.reported_kinds() == ["hang"]


def test_a_silence_that_is_usual_in_its_phase_is_no_hang_there_but_is_in_another(node):
    (rank,) = node.job(1)
    for _ in range(3):
        rank.at("other")
        node.watch(55)
        rank.steps(100)
        node.watch(5)
    rank.at("other")
    node.watch(200)
    assert node.reported_kinds() == []
    rank.at("backward")
    node.watch(70)
    assert node.reported_kinds() == ["hang"]


def test_what_was_reported_as_a_hang_is_usual_from_the_second_time_on(node):
    (rank,) = node.job(1)
    for expected in (2, 4, 4, 4):
        rank.at("other")
        node.watch(300, every=5)
        rank.steps(100)
        node.watch(5)
        assert len(node.reported_kinds()) == expected


def test_before_a_training_is_known_and_while_torch_compiles_more_time_is_given(node):
    (rank,) = node.job(1, steps=0)
    rank.at("forward", "(root)", step=1)
    node.watch(300)  # the first step compiles
    rank.steps(500)
    rank.page.cells[rank.compiling] = 1.0
    rank.at("forward", "(root)")
    node.watch(300)  # a batch of another shape
    assert node.reported_kinds() == []
    node.watch(310)
    assert node.reported_kinds() == ["hang"]
    rank.page.cells[rank.compiling] = 0.0
    rank.at("forward", "(root)")
    node.watch(65)
    assert node.reported_kinds() == ["hang", "hang_over", "hang"], "what it took to compile is not what a forward takes"


def test_who_waits_for_a_rank_that_still_works_does_not_hang(node):
    """One rank evaluates for three minutes, and one compiles; the others wait for it in the next backward."""
    ranks = node.job(4)
    for rank in ranks[1:]:
        rank.at("backward", step=12)
    for _ in range(180):
        ranks[0].at("forward", "blocks.1")
        node.watch(1)
    ranks[0].page.cells[ranks[0].compiling] = 1.0
    ranks[0].at("forward", "blocks.1", step=12)
    node.watch(180)
    assert node.reported_kinds() == []


def test_who_waits_for_a_rank_whose_long_silence_is_usual_does_not_hang(node):
    """Only rank 0 writes checkpoints, which take a minute and more; the others wait for it in varying places."""
    ranks = node.job(4)
    for seconds, phase in ((50, "optimizer"), (55, "optimizer"), (100, "backward"), (200, "forward")):
        for rank in ranks:
            rank.steps(100)
        node.watch(3)
        for rank in ranks[1:]:
            rank.at(phase, step=rank.page.cells[rank.done] + 1)
        ranks[0].at("data")
        node.watch(seconds)
    assert node.reported_kinds() == []


def test_that_the_gil_is_held_is_seen_by_hookds_own_thread_which_does_not_run(node):
    (rank,) = node.job(1)
    ticks = rank.number("hookd_agent_ticks", "counter")
    for expected in (False, True):
        rank.at("forward", "blocks.2", step=20)
        for _ in range(70):
            rank.page.cells[ticks] += not expected
            node.watch(1)
        assert ("the GIL is held" in node.last()["message"]) == expected
        rank.steps(1)
        rank.page.cells[ticks] += 1
        node.watch(2)


def test_who_waits_for_a_paused_rank_does_not_hang_nor_when_it_goes_on(node):
    ranks = node.job(2)
    ranks[0].at("paused", step=12)
    ranks[1].at("backward", step=12)
    node.watch(900, every=5)
    ranks[0].at("backward")
    node.watch(30)
    assert node.reported_kinds() == []


@pytest.mark.parametrize("identity", [{}, {"script": "/usr/lib/python3/ipykernel_launcher.py"}])
def test_a_process_that_only_waits_for_a_person_does_not_hang(node, identity):
    """For example a service that has never trained, before its next request, or a notebook before its next cell."""
    (rank,) = node.job(1, steps=50 if identity else 0, **identity)
    rank.at("other")
    node.watch(3600, every=5)
    assert node.reported_kinds() == []


def test_a_rank_that_goes_on_alone_when_the_others_have_ended_is_given_more_time(node):
    """Rank 0 uploads the weights; or it waits for one that has raised."""
    ranks = node.job(2)
    ranks[1].page.set_state("exited")
    ranks[1].target.lose()
    ranks[0].at("other")
    node.watch(500, every=5)
    assert node.reported_kinds() == []
    ranks[0].at("backward")
    node.watch(70)
    assert "; rank 0 waits for it in backward" in node.last()["message"]


def test_other_threads_events_do_not_hide_that_the_training_stands(node):
    (rank,) = node.job(1)
    other = rank.page.thread(os.getpid() + 1, "evaluates an average of the weights")
    rank.at("forward", "head", step=12)
    for _ in range(70):
        rank.page.cells[other + EVENTS] += 1
        node.watch(1)
    assert node.reported_kinds() == ["hang"]


def test_autograds_own_threads_count_for_the_training(node):
    (rank,) = node.job(1)
    engine = rank.page.thread(os.getpid() + 1, "thread")
    rank.at("backward", step=12)
    for _ in range(120):
        rank.page.cells[engine + MODULE] = 1 + rank.page.cells[engine + MODULE] % 3
        node.watch(1)
    assert node.reported_kinds() == []


def test_a_training_loop_inside_of_a_modules_forward_is_not_silent(node):
    """Events are counted at outermost calls alone, and there is one such call for ever."""
    (rank,) = node.job(1)
    rank.at("forward", "(root)", step=1)
    for n in range(120):
        rank.page.cells[rank.base + STEP] = n
        node.watch(1)
    assert node.reported_kinds() == []


@pytest.mark.parametrize("seed", range(4))
def test_healthy_trainings_are_never_reported(node, seed):
    """Steps of any speed with a spread, checkpoints of 30 s, evaluations; ranks meet in each backward."""
    ranks, chance = node.job(2), random.Random(seed)
    usual = chance.choice([0.5, 8.0, 25.0])
    for n in range(40):
        for phase in ("data", "forward", "backward"):
            for rank in chance.sample(ranks, 2):
                rank.at(phase, "blocks.1" if phase == "forward" else None)
                node.watch(usual * chance.uniform(0.3, 1.0), every=5)
        if n % 8 == 0:
            ranks[0].at("other")
            node.watch(30, every=5)
        if n % 10 == 5:
            for _ in range(60):
                ranks[0].at("forward", "head")
                node.watch(2, every=2)
        for rank in ranks:
            rank.steps(1, 4 * usual)
    assert node.reported_kinds() == []


@emulated.lacks("proc")
def test_a_process_that_is_stopped_is_the_one_that_is_waited_for(node):
    """Its place says nothing: both are in their backward."""
    waiting = Rank(lambda: node.now, os.getpid(), "0", world_size=2)
    with Process([sys.executable, "-c", "input()"], env={}, stdin=True) as process:
        stopped = Rank(lambda: node.now, process.pid, "1", world_size=2)
        node.ranks = [waiting, stopped]
        for rank in node.ranks:
            rank.steps(10)
            rank.at("backward", step=20)
        process.signal(signal.SIGSTOP)
        wait_until(lambda: proc.status(process.pid).state == "T", what="the stop")
        node.watch(70)
        assert node.last()["rank"] == "1"
        assert "The process is stopped (by SIGSTOP" in node.last()["message"]
        process.signal(signal.SIGKILL)
        process.wait()
        stopped.target.lose()
        node.watch(100)
        assert node.reported_kinds() == ["hang", "hang_over", "hang"]
        assert "rank 1 has ended (signal SIGKILL); rank 0 waits for it in backward" in node.last()["message"]


def at(rank, phase, step=20, module=None, place=0, **more):
    return RankPosition(str(rank), 75.0, phase=phase, module=module, place=place, step=step, **more)


@pytest.mark.parametrize(
    ("ranks", "guilty"),
    [
        ([at(0, "backward"), at(1, "forward", module="b.2", place=3)], ["1"]),
        ([at(0, "data", 21), at(1, "optimizer", 20)], ["1"]),
        ([at(0, "data", 21), at(1, "forward", 21)], ["0"]),
        ([at(0, "forward", module="b.3", place=4), at(1, "forward", module="b.2", place=3)], ["1"]),
        ([at(0, "forward", module="b.2.fc", place=4), at(1, "forward", module="b.2", place=3)], ["0", "1"]),
        ([at(0, "forward", module="b.3", place=4, model=1), at(1, "forward", module="b.2", place=3)], ["0", "1"]),
        ([at(0, "other"), at(1, "backward")], ["0", "1"]),
        ([at(0, "backward"), at(1, "backward")], ["0", "1"]),
        ([at(0, "backward", 900, is_absolute=False), at(1, "forward", 7)], ["1"]),
        ([at(0, "backward", 7, is_absolute=False), at(1, "backward", 900)], ["0", "1"]),
        ([at(0, "backward", issued={"0-1": 5.0, "0,2": 9.0}), at(1, "backward", issued={"0-1": 4.0}),
          at(2, "backward", issued={"0,2": 8.0, "2-3": 2.0}), at(3, "backward", issued={"2-3": 1.0})], ["1", "3"]),
        ([at(0, "backward", issued={"0-1": 5.0}), at(1, "backward", issued={"0-1": 4.0}, is_mute=True)], ["0", "1"]),
        ([at(0, "forward"), at(1, "backward", state="T")], ["1"]),
        ([at(0, "forward"), at(1, "backward"), RankPosition("2", ended="died")], ["2"]),
    ],
)  # fmt: skip
def test_who_is_waited_for(ranks, guilty):
    verdict = judge(ranks)
    assert sorted(one.rank for one in verdict.guilty) == guilty
    assert sorted(one.rank for one in (*verdict.guilty, *verdict.waiting)) == [one.rank for one in ranks]


def test_a_page_cannot_write_to_the_terminal_nor_make_the_verdict_slow(node):
    ranks = node.job(2)
    ranks[1].ids["blocks.2"] = ranks[1].page.module("\x1b[31mred\nline", "Module", 0)
    for rank in ranks:
        for n in range(200):
            rank.issued(f"\x1b[31m{n}", n * int(rank.rank))
        rank.page.cells[rank.seconds] = float("inf")
    stall(node)
    node.watch(70)
    assert node.last()["message"].isprintable()
    assert node.last()["detail"]["basis"] == "cpu"


def test_where_nothing_tells_who_is_waited_for_it_says_so():
    same = [at(rank, "backward", issued={"0-1": 7.0}) for rank in (0, 1)]
    assert sentence(judge(same), 2) == (
        "ranks 0, 1 stand in backward (step 20) for 75 s. All have issued the same collectives: one of them does not "
        "complete, on a device or in the network"
    )
    assert sentence(judge([at(0, "backward")]), 8).endswith(
        "1 of 8 ranks hang here; the others are unknown here, or make progress"
    )


def test_a_daemon_that_has_just_come_knows_slow_steps_from_the_page(node):
    (rank,) = node.job(1, steps=0)
    rank.steps(20, 40.0)
    node.restart()
    rank.at("backward")
    node.watch(190)
    assert node.reported_kinds() == []
    node.watch(15)
    assert node.reported_kinds() == ["hang"]


def test_the_usual_time_of_a_step_is_not_spoilt_by_one_long_one(node):
    rank = Rank(lambda: node.now, os.getpid(), "0")
    node.ranks = [rank]
    rank.steps(20, 0.5)
    rank.page.cells[rank.seconds + len(BOUNDS)] += 1
    rank.page.cells[rank.seconds + len(BOUNDS) + 1] += 10_000.0
    reader = PageReader(os.dup(rank.page.fd))
    assert step_s(reader.read()) == 1.0
    rank.page.cells[rank.seconds] = float("nan")
    assert step_s(reader.read()) == 0.0
    reader.close()
