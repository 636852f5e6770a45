"""The fingerprints that a daemon keeps: which replicas have parted, since when and where, and how much room they take."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest

from hookd.errors import ControlError, HookdError
from hookd.tool.attach import Control
from hookd.tool.daemon.fingerprints.keeper import DIRECTORY, SHARE, Keeper
from hookd.tool.daemon.fingerprints.kept import Kept, agreement, file_name
from hookd.tool.daemon.fingerprints.parted import Parted
from hookd.tool.fingerprints import file
from hookd.tool.fingerprints.steps import Entry, Key, Step
from hookd.wire.stream import StreamWriter
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


class Recorded:
    """A target with the plugin, of which a test is the agent."""

    def __init__(self, pid, **identity):
        self.pid, self.ended, self.claim = pid, None, SimpleNamespace(run="train.py", rank="0")
        self.identity, self.ongoing = SimpleNamespace(world_size=1), {}
        self.snapshot = SimpleNamespace(identity={"plugins": {"fingerprint": {"options": {}}}, **identity})
        self.writer = None

    def last(self):
        return self.snapshot

    def request(self, op, *, fds, name):
        assert (op, name) == ("stream", "fingerprint")
        self.writer = StreamWriter(fds[0], os.fstat(fds[0]).st_size)

    def send(self, number):
        head = {"step": number, "is_absolute": True, "mark": 0, "settings": [], "unread": 0, "at": 0, "keys": []}
        data = json.dumps(head).encode()
        self.writer.write(len(data).to_bytes(4, "little") + data)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.writer is not None:
            self.writer.close()


@pytest.fixture
def keep(stack, tmp_path, monkeypatch):
    """Return a keeper of these targets, whose thread is the test."""

    def keep(*targets):
        by_pid = {target.pid: target for target in targets}
        monkeypatch.setattr(Control, "connect", lambda pid, _: by_pid[pid])
        now = iter(range(0, 1_000_000, 100))
        keeper = Keeper(new_fleet(stack), tmp_path, 1 << 30, clock=lambda: next(now))
        keeper._targets = targets
        stack.callback(keeper.close)
        return keeper

    return keep


def test_what_one_target_says_of_itself_does_not_stop_the_recording_of_others(keep):
    hostile, good = Recorded(8, rank="first"), Recorded(9, rank=3)
    keeper = keep(hostile, good)
    for _ in range(2):
        keeper.round()
    good.send(1)
    good.send(2)
    hostile.writer.write(b"nonsense")
    keeper.round()
    assert keeper.of(good).steps == 2
    assert [kept.pid for kept in keeper.every()] == [9]


def test_a_daemon_that_ends_does_not_wait_for_each_target_that_is_silent(keep):
    targets = [Recorded(8), Recorded(9)]
    keeper = keep(*targets)
    keeper.round()
    targets[0].request = lambda *_, **__: keeper._over.set()
    keeper.round()
    assert targets[1].writer is None


def test_a_target_that_does_not_answer_is_asked_less_and_less(keep):
    def refuse(*_, **__):
        asked.append(True)
        raise ControlError("the agent does not answer", reason="gone")

    asked, silent, good = [], Recorded(8), Recorded(9)
    silent.request = refuse
    keeper = keep(silent, good)
    for _ in range(100):
        keeper.round()
    assert 10 < len(asked) < 25  # in 10,000 s and more
    assert good.writer is not None


def test_a_recording_without_a_step_leaves_no_file(keep, tmp_path):
    target = Recorded(8)
    keeper = keep(target)
    for _ in range(2):
        keeper.round()
    assert len(list((tmp_path / DIRECTORY).iterdir())) == 1
    target.ended = 1.0
    keeper.round()
    assert not list((tmp_path / DIRECTORY).iterdir())
    assert keeper.every() == []


def test_what_is_not_a_file_of_fingerprints_in_the_directory_is_left_alone(keep, tmp_path):
    directory = tmp_path / DIRECTORY
    directory.mkdir(mode=0o700)
    (directory / "folder.jsonl").mkdir()
    (directory / "link.jsonl").symlink_to("nowhere")
    (directory / ".a.jsonl.7.part").write_text("of a daemon that was killed")
    target = Recorded(8)
    keeper = keep(target)
    assert keeper.every() == []
    for _ in range(2):
        keeper.round()
    assert [kept.pid for kept in keeper.every()] == [8]
    assert sorted(path.name for path in directory.iterdir())[:2] == ["folder.jsonl", "link.jsonl"]


def test_a_file_that_was_deleted_to_make_room_is_not_listed(tmp_path):
    directory = tmp_path / DIRECTORY
    directory.mkdir()
    with file.Writer(directory / "a.jsonl", {"run": "a.py"}, 1 << 20) as writer:
        writer.add(step(1))
    keeper = Keeper(None, tmp_path, 1)
    assert len(keeper.every()) == 1
    keeper._make_room()
    assert keeper.every() == []
