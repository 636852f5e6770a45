"""Which rank is slow, from the phases of each: real pages, a clock of the test's own."""

from __future__ import annotations

import random
import statistics

import pytest

from hookd.tool.daemon.watch.stragglers import PARTS, Stragglers, _late
from tests.support.pages import Ranks, new_fleet

OWN = {"data": 5.0, "forward": 40.0, "optimizer": 5.0, "other": 2.0}  # milliseconds a step
BACKWARD = 60.0


class Job(Ranks):
    """Ranks in step: what one needs longer, the others wait for in the phase of the collective."""

    def __init__(self, stack, fleet, ranks, *, waits_in="backward", noise=0.1):
        super().__init__(stack, ranks)
        self.random = random.Random(0)
        self.waits_in, self.noise, self.now = waits_in, noise, 0.0
        self.watcher = Stragglers(fleet, lambda: self.now)

    def steps(self, count=7, *, extra=None, module=None, lost=None):
        """Take some steps; `extra[rank][part]` are milliseconds more; then have the daemon look."""
        for _ in range(count):
            self._step(extra or {}, module)
        for target in self.targets:
            target.read()
        self.watcher.poll([one for one in self.targets if one is not lost])

    def _step(self, extra, module):
        own = []
        for rank in range(len(self.pages)):
            mine = {part: ms * self.random.uniform(1 - self.noise, 1 + self.noise) for part, ms in OWN.items()}
            for part, more in extra.get(rank, {}).items():
                mine[part] += more
            own.append({**mine, "backward": BACKWARD})
        longest = max(sum(mine.values()) for mine in own)
        for rank, mine in enumerate(own):
            mine[self.waits_in] += longest - sum(mine.values())
            self.add(rank, "hookd_steps", 1.0)
            for phase, ms in mine.items():
                self.add(rank, "hookd_timing_phase_seconds", ms / 1e3, phase=phase)
            for name in ("blocks.0", "blocks.1"):
                late = extra.get(rank, {}).get("forward", 0.0) if name == module else 0.0
                self.add(rank, "hookd_timing_forward_seconds", (20 + late) / 1e3, module=name)
        self.now += longest / 1e3

    def samples(self, rank):
        return {family.name: value for family, _, value in self.watcher.samples(self.targets[rank])}

    def slow(self):
        return [rank for rank in range(len(self.pages)) if self.samples(rank).get("hookd_straggler")]


@pytest.fixture
def fleet(stack):
    return new_fleet(stack)


@pytest.fixture
def job(stack, fleet):
    return lambda ranks=4, **how: Job(stack, fleet, ranks, **how)


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8])
def test_each_is_compared_with_the_median_of_the_others(count):
    drawn = random.Random(count)
    seconds = [drawn.choice([1.0, 2.0, 5.0, 9.0]) for _ in range(count)]
    others = [[*seconds[:n], *seconds[n + 1 :]] for n in range(count)]
    assert _late(seconds) == [own - statistics.median(rest) for own, rest in zip(seconds, others, strict=True)]


def reported(fleet):
    return [(one["rank"], one["kind"]) for one in reversed(fleet.incidents())]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("part", PARTS)
def test_the_rank_that_does_not_wait_is_named_within_50_steps(job, fleet, ranks, part):
    training = job(ranks)
    for _ in range(7):
        training.steps(extra={1: {part: 50.0}})
    (incident,) = fleet.incidents()
    assert (incident["rank"], incident["kind"], incident["detail"]["part"]) == ("1", "straggler", part)
    assert incident["step"] <= 49
    assert training.slow() == [1]


def test_the_incident_says_how_slow_where_and_who_waits(job, fleet):
    training = job()
    for _ in range(6):
        training.steps()
    for _ in range(8):
        training.steps(extra={1: {"forward": 52.0}}, module="blocks.1")
    (incident,) = fleet.incidents()
    assert "rank 1 needs 2.3 times the other ranks' time in forward: 92" in incident["message"]
    assert incident["message"].endswith("ms instead of 20 ms; ranks 0, 2, 3 wait for it")
    assert incident["module"] == "blocks.1"


def test_the_module_is_named_where_ranks_were_uneven_for_long_before(job, fleet):
    training = job(2)
    for _ in range(25):
        training.steps(extra={0: {"data": 7.0}})
    assert fleet.incidents() == []
    for _ in range(8):
        training.steps(extra={1: {"forward": 52.0}}, module="blocks.1")
    (incident,) = fleet.incidents()
    assert (incident["rank"], incident["module"]) == ("1", "blocks.1")


def test_the_score_is_the_time_outside_of_waiting_over_the_median(job):
    training = job(noise=0.0)
    for _ in range(8):
        training.steps(extra={2: {"forward": 26.0}})
    assert training.samples(2)["hookd_straggler_score"] == pytest.approx(1.5)
    assert training.samples(0)["hookd_straggler_score"] == pytest.approx(1.0)


def test_it_is_reported_once_and_once_more_when_it_is_over(job, fleet):
    training = job()
    for _ in range(20):
        training.steps(extra={1: {"data": 50.0}})
    assert reported(fleet) == [("1", "straggler")]
    for _ in range(10):
        training.steps()
    assert reported(fleet) == [("1", "straggler"), ("1", "straggler_over")]
    assert not training.slow()


def test_a_daemon_after_this_one_does_not_tell_it_again(job, fleet):
    training = job()
    for _ in range(8):
        training.steps(extra={1: {"forward": 50.0}})
    for target in training.targets:
        target.ongoing = {}
        fleet.catch_up(target)
    training.watcher = Stragglers(fleet, lambda: training.now)
    for _ in range(8):
        training.steps(extra={1: {"forward": 50.0}})
    assert reported(fleet) == [("1", "straggler")]
    assert training.slow() == [1]


@pytest.mark.parametrize("waits_in", ["backward", "other", "optimizer", "forward"])
def test_slow_data_is_found_wherever_the_collective_is(job, waits_in):
    training = job(waits_in=waits_in)
    for _ in range(9):
        training.steps(extra={3: {"data": 40.0}})
    assert training.slow() == [3]


@pytest.mark.parametrize("waits_in", ["backward", "other", "optimizer"])
def test_a_slow_forward_is_found_wherever_the_collective_is_after_it(job, waits_in):
    training = job(2, waits_in=waits_in)
    for _ in range(9):
        training.steps(extra={1: {"forward": 40.0}})
    assert training.slow() == [1]


@pytest.mark.parametrize("count", [2, 4])
def test_a_wait_inside_the_forward_is_not_taken_for_a_slow_forward(job, fleet, count):
    """FSDP gathers parameters there, and so waits for a rank that is late before."""
    training = job(count, waits_in="forward")
    for rank in range(count):
        training.add(rank, "hookd_collectives_phase_ratio", 1.0, phase="forward")
    for _ in range(8):
        training.steps(extra={1: {"other": 50.0}})
    (incident,) = fleet.incidents()
    assert (incident["rank"], incident["kind"], incident["detail"]["part"]) == ("1", "straggler", "other")


def test_a_slow_forward_with_collectives_is_found_if_nobody_is_late_elsewhere(job, fleet):
    """Under DistributedDataParallel rank 0 sends buffers there, and the wait is in the backward."""
    training = job()
    for rank in range(4):
        training.add(rank, "hookd_collectives_phase_ratio", 1.0, phase="forward")
    for _ in range(8):
        training.steps(extra={1: {"forward": 50.0}})
    assert reported(fleet) == [("1", "straggler")]


def test_two_of_four_may_be_slow(job, fleet):
    training = job()
    for _ in range(8):
        training.steps(extra={1: {"forward": 50.0}, 2: {"forward": 50.0}})
    assert training.slow() == [1, 2]
    assert all("ranks 0, 3 wait for it" in one["message"] for one in fleet.incidents())


def test_noise_of_half_the_time_makes_no_straggler(job, fleet):
    training = job(noise=0.5)
    for _ in range(150):
        training.steps(5)
    assert not fleet.incidents()


def test_a_checkpoint_that_one_rank_saves_now_and_then_makes_none(job, fleet):
    training = job()
    for n in range(60):
        training.steps(extra={0: {"other": 800.0}} if n % 6 == 0 else None)
    assert not fleet.incidents()


def test_a_burst_of_two_seconds_on_one_rank_makes_none(job, fleet):
    training = job()
    for n in range(40):
        training.steps(extra={0: {"forward": 100.0}} if n % 20 in (8, 9) else None)
    assert not fleet.incidents()


def test_a_core_that_is_busy_with_something_else_for_eight_seconds_makes_none(job, fleet):
    training = job(2)
    for n in range(80):
        training.steps(extra={0: {"forward": 20.0}} if n % 40 in range(20, 28) else None)
    assert not fleet.incidents()


def test_a_rank_that_is_a_little_slow_for_long_is_named(job):
    training = job(2)
    for n in range(60):
        training.steps(extra={0: {"forward": 20.0}} if n >= 20 else None)
    assert training.slow() == [0]


def test_ranks_that_do_not_keep_step_are_not_compared(job, fleet):
    training = job(2)
    for _ in range(12):
        training.add(1, "hookd_steps", 4.0)
        training.steps(extra={1: {"forward": 50.0}})
    assert not fleet.incidents()
    assert not training.samples(0)


def test_the_judgement_on_ranks_that_keep_step_no_more_is_withdrawn(job):
    training = job(2)
    for _ in range(8):
        training.steps(extra={1: {"forward": 50.0}})
    assert training.slow() == [1]
    training.add(1, "hookd_steps", 9.0)
    training.steps()
    assert not training.samples(1)


def test_a_rank_that_leaves_makes_the_others_begin_anew(job):
    training = job()
    for _ in range(8):
        training.steps(extra={1: {"forward": 50.0}})
    training.steps(lost=training.targets[1])
    assert not training.samples(1)
    assert not training.slow()
    for _ in range(8):
        training.steps(lost=training.targets[1])
    assert training.samples(0)["hookd_straggler"] == 0


def test_a_single_process_has_no_score(job):
    training = job(1)
    for _ in range(8):
        training.steps()
    assert not training.samples(0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -5.0, 1e300])
def test_a_page_that_says_nonsense_does_no_harm(job, fleet, value):
    training = job(3)
    for n in range(20):
        training.steps()
        if n == 10:
            training.add(0, "hookd_timing_phase_seconds", value, phase="forward")
            training.add(1, "hookd_steps", value)
    assert not fleet.incidents()


def test_counters_that_begin_anew_make_no_judgement(job, fleet):
    training = job(2)
    for n in range(14):
        training.steps()
        if n == 6:
            training.add(0, "hookd_steps", -40.0)
    assert not fleet.incidents()
