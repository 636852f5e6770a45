"""The replica that differs, found from the checksums of each rank: real pages."""

from __future__ import annotations

import pytest

from hookd.tool.daemon.fleet.ranks import named
from hookd.tool.daemon.watch.drift import Drift
from tests.support.pages import Ranks, new_fleet

ALIKE = {"first": 3.8e15, "second": 17.0, "(root)": 2.0**52 - 48}


class Job(Ranks):
    """Ranks that publish checksums as the plugin does."""

    def __init__(self, stack, fleet, ranks):
        super().__init__(stack, ranks)
        self.watcher = Drift(fleet)

    def publish(self, rank, mark, *, layout=1.0, **changed):
        for module, value in {**ALIKE, **changed}.items():
            self.set(rank, "hookd_drift_checksum", value + mark, module=module)
        for name, value in (("layout", layout), ("step", mark / 2), ("mark", mark)):
            self.set(rank, f"hookd_drift_{name}", value)

    def poll(self, times=1):
        for _ in range(times):
            for target in self.targets:
                target.read()
            self.watcher.poll(self.targets)

    def diverged(self):
        return [value for target in self.targets for _, _, value in self.watcher.samples(target)]


@pytest.fixture
def fleet(stack):
    return new_fleet(stack)


@pytest.fixture
def job(stack, fleet):
    return lambda ranks=3: Job(stack, fleet, ranks)


def test_replicas_that_are_alike_are_said_to_be(job, fleet):
    training = job()
    for mark in range(100, 1000, 100):
        for rank in range(3):
            training.publish(rank, mark)
        training.poll()
    assert training.diverged() == [0, 0, 0]
    assert not fleet.incidents()


def test_the_rank_that_differs_is_named_with_its_module_and_since_when(job, fleet):
    training = job()
    for mark in (100, 200, 300):
        for rank in range(3):
            training.publish(rank, mark, **({"second": 18.0} if rank == 1 and mark > 200 else {}))
        training.poll(3)
    (incident,) = fleet.incidents()
    assert (incident["rank"], incident["module"], incident["step"]) == ("1", "second", 150)
    assert incident["message"] == (
        "the replica of rank 1 differs from ranks 0, 2 in second; first seen at step 150, not yet at step 100"
    )
    assert training.diverged() == [0, 1, 0]


def test_of_two_that_differ_nobody_can_tell_which_is_right(job, fleet):
    training = job(2)
    training.publish(0, 100)
    training.publish(1, 100, first=1.0)
    training.poll(2)
    (incident,) = fleet.incidents()
    assert "it is unknown which" in incident["message"]
    assert training.diverged() == [1, 1]


def test_of_many_ranks_the_first_are_named_and_the_others_counted(job):
    for count, words in ((9, "ranks 0, 1, 2, 3, 4, 5, 6, 7, 8"), (10, "ranks 0, 1, 2, 3, 4, 5, 6, 7, 2 more")):
        assert named(reversed(job(count).targets)) == words


def test_it_is_reported_once_and_once_more_when_they_are_alike_again(job, fleet):
    training = job()
    for mark in range(100, 1500, 100):
        for rank in range(3):
            training.publish(rank, mark, **({"first": float(mark)} if rank == 2 and 300 <= mark < 1000 else {}))
        training.poll(2)
    assert [(one["rank"], one["kind"]) for one in reversed(fleet.incidents())] == [("2", "drift"), ("2", "drift_over")]


def test_ranks_are_compared_at_the_same_mark_only(job, fleet):
    """Each poll finds the ranks at different marks; differences between marks are the training's progress."""
    training = job()
    for mark in range(100, 1000, 100):
        for rank in range(3):
            training.publish(rank, mark - 100 * (rank == 0), **({"second": 1.0} if rank == 1 and mark > 500 else {}))
        training.poll(2)
    (incident,) = fleet.incidents()
    assert (incident["rank"], incident["step"]) == ("1", 300)


def test_what_was_being_written_when_it_was_read_is_no_difference(job, fleet):
    training = job(2)
    for mark in range(100, 1000, 100):
        training.publish(0, mark)
        training.set(1, "hookd_drift_checksum", 4.0, module="first")
        training.poll()
        training.publish(1, mark)
        training.poll()
    assert not fleet.incidents()


def test_a_rank_that_is_just_writing_is_not_forgotten(job, fleet):
    training = job(2)
    for mark in (100, 200):
        training.set(1, "hookd_drift_mark", 0.0)
        training.poll()
        for rank in (0, 1):
            training.publish(rank, mark, **({"first": 1.0} if rank and mark == 200 else {}))
        training.poll(2)
    (incident,) = fleet.incidents()
    assert incident["detail"]["agreed_at_step"] == 50


def test_ranks_that_hold_different_things_are_not_compared(job, fleet):
    """Stages of a pipeline, shards: another layout."""
    training = job(4)
    for mark in (100, 200, 300):
        for rank in range(4):
            training.publish(rank, mark, layout=1.0 + rank // 2, first=5.0 + rank // 2)
        training.poll(2)
    assert not fleet.incidents()
    assert training.diverged() == [0, 0, 0, 0]


def test_a_daemon_after_this_one_does_not_tell_it_again(job, fleet):
    training = job()
    for rank in range(3):
        training.publish(rank, 100, **({"first": 1.0} if rank == 2 else {}))
    training.poll(3)
    training.watcher = Drift(fleet)
    training.poll(3)
    assert len(fleet.incidents()) == 1
    assert training.diverged() == [0, 0, 1]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 1e300])
@pytest.mark.parametrize("name", ["mark", "step", "layout"])
def test_a_page_that_says_nonsense_does_no_harm(job, fleet, name, value):
    training = job(2)
    for rank in (0, 1):
        training.publish(rank, 100)
    training.set(0, f"hookd_drift_{name}", value)
    training.poll(3)
    assert not fleet.incidents()


def test_without_the_plugin_nothing_is_said(job):
    training = job()
    training.poll(2)
    assert training.diverged() == []
