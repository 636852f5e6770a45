"""The fingerprints that a daemon keeps: which replicas have parted, since when and where, and how much room they take."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from hookd.errors import HookdError
from hookd.tool.daemon.fingerprints.keeper import DIRECTORY, SHARE, Keeper
from hookd.tool.daemon.fingerprints.kept import Kept, agreement, file_name
from hookd.tool.daemon.fingerprints.parted import Parted
from hookd.tool.fingerprints import file
from hookd.tool.fingerprints.steps import Entry, Key, Step
from tests.support.pages import Ranks, new_fleet


def step(number, *, data=0, grad=1, weight=1, mark=0):
    """Return a step with a batch, a gradient and a weight of these digests."""
    places = (("data", "", "input 0", data), ("gradients", "w", "grad", grad), ("update", "w", "value", weight))
    entries = {
        Key(phase, name, 0, slot, "float32", (2,)): Entry(bits + 1, 0, 1.0 + bits, 0.0, 1.0)
        for phase, name, slot, bits in places
    }
    return Step(number, is_absolute=not mark, entries=entries, mark=mark)


class Job:
    """Ranks whose fingerprints are kept, in files of their own."""

    def __init__(self, stack, directory, ranks):
        self.fleet = new_fleet(stack)
        self.targets = Ranks(stack, ranks).targets
        self.parted = Parted(self.fleet)
        self.kept, self.writers = {}, {}
        for rank, target in enumerate(self.targets):
            path = directory / f"{rank}.jsonl"
            self.kept[target] = Kept(path, "train.py", str(rank), target.pid, 1.0)
            about = {"run": "train.py", "rank": rank}
            self.writers[target] = stack.enter_context(file.Writer(path, about, 1 << 20))

    def add(self, *steps):
        for target, one in zip(self.targets, steps, strict=True):
            self.kept[target].add(one, self.writers[target].add(one), 2.0)
        self.parted.compare(self.kept)

    def odd(self):
        return [value for target in self.targets for _, _, value in self.parted.samples(target)]


@pytest.fixture
def job(stack, tmp_path):
    return lambda ranks: Job(stack, tmp_path, ranks)


def test_the_rank_that_parts_is_named_with_the_place_and_the_last_equal_step(job):
    training = job(3)
    training.add(*(step(7, data=rank) for rank in range(3)))
    assert training.odd() == [0, 0, 0]
    training.add(*(step(8, data=rank, grad=9 if rank == 0 else 2) for rank in range(3)))
    assert training.odd() == [1, 0, 0]
    training.add(*(step(9, data=rank, grad=9 if rank == 0 else 2, weight=rank == 0) for rank in range(3)))
    (incident,) = training.fleet.incidents()
    assert (incident["rank"], incident["kind"], incident["step"]) == ("0", "parted", 8)
    assert incident["message"] == (
        "rank 0 has parted from ranks 1, 2 at step 8; they were equal at step 7. With rank 1 as A and rank 0 as B: Step 8: same "
        "weights; all gradients of B are 3.333 times those of A when the optimizer uses them."
    )
    assert (incident["detail"]["phase"], incident["detail"]["ranks"]) == ("gradients", ["0"])


def test_ranks_that_are_equal_again_are_said_to_be_and_of_two_nobody_is_right(job):
    training = job(2)
    for number, weight in ((1, 1), (2, 5), (3, 1)):
        training.add(step(number), step(number, weight=weight))
        assert training.odd() == ([1, 1] if weight == 5 else [0, 0])
    kinds = [(one["kind"], one["rank"]) for one in reversed(training.fleet.incidents())]
    assert kinds == [("parted", "1"), ("parted_over", "1")]
    assert "unknown which are right" in training.fleet.incidents()[1]["message"]


def test_ranks_that_count_steps_differently_are_compared_by_their_marks(job):
    training = job(2)
    training.add(step(20, mark=41, weight=3), step(31, mark=43, weight=4))
    training.add(step(21, mark=43, weight=4), step(32, mark=45, weight=5))
    assert training.odd() == [0, 0]
    training.add(step(22, mark=45, weight=5), step(33, mark=47, weight=7))
    training.add(step(23, mark=47, weight=6), step(34, mark=49, weight=8))
    (incident,) = training.fleet.incidents()
    assert (incident["rank"], incident["step"], incident["detail"]["agreed_at_step"]) == ("1", 33, 32)
    assert incident["detail"]["parameter"] == "w"


def test_shards_and_experts_that_never_were_equal_are_not_compared(job):
    training = job(4)
    for number in (1, 2):
        training.add(*(step(number, weight=rank // 2) for rank in range(4)))  # two shards of two replicas each
    assert training.odd() == [0, 0, 0, 0]
    training.add(*(step(3, weight=rank) for rank in range(4)))
    assert sorted(one["rank"] for one in training.fleet.incidents()) == ["1", "3"]


def test_the_daemon_knows_the_runs_of_an_earlier_one_and_how_far_they_are_equal(tmp_path):
    directory = tmp_path / DIRECTORY
    directory.mkdir()
    for name, changed in (("a.py", 99), ("b.py", 4)):
        with file.Writer(directory / f"{name}.jsonl", {"run": name, "began": float(changed)}, 1 << 20) as writer:
            for number in range(1, 7):
                writer.add(step(number, data=number >= changed))
    (directory / "foreign.jsonl").write_text("{}\n")
    found = Keeper(None, tmp_path, 1 << 30).every()
    assert [(kept.run, kept.steps, kept.is_live) for kept in found] == [("a.py", 6, False), ("b.py", 6, False)]
    assert agreement(*found) == (6, 3, 4)


def test_old_files_make_room_for_new_ones_and_files_in_use_do_not(tmp_path):
    directory = tmp_path / DIRECTORY
    directory.mkdir()
    share = 1000
    keeper = Keeper(None, tmp_path, share * SHARE)
    for age in range(SHARE + 3):
        path = directory / f"{age:02}.jsonl"
        path.write_bytes(b"x" * share)
        os.utime(path, (1e9 - age, 1e9 - age))
    keeper._make_room()
    assert sorted(path.name for path in directory.iterdir()) == [f"{age:02}.jsonl" for age in range(SHARE - 1)]
    keeper._recordings = {
        number: SimpleNamespace(kept=SimpleNamespace(path=tmp_path / str(number))) for number in range(SHARE)
    }
    with pytest.raises(HookdError, match="room for"):
        keeper._make_room()


def test_the_name_of_a_file_is_plain_whatever_the_run_is_called():
    assert file_name("train.py@3fa29b1c", "0", 7, 1.5) == "train.py@3fa29b1c-rank0-7-5dc.jsonl"
    assert file_name("../../etc/passwd\n", "1", 7, 0.0) == "_.._etc_passwd_-rank1-7-0.jsonl"
    assert len(file_name("a" * 500, "0", 7, 0.0)) < 120
