"""The file of a fingerprint: bounded, checked on reading, and whole up to its last line however the writer ended."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from hookd.errors import HookdError
from hookd.tool.fingerprints import comparison, file, recording, steps
from hookd.tool.fingerprints.steps import Decoder, Entry, Key, Step

ABOUT = {"run": "train.py", "rank": 0}


def step(number, bits=1, names=("a", "b"), **more):
    entries = {
        Key("forward", name, 0, "output 0", "float32", (2, 3)): Entry(bits + at, 0, 1.5, -1.0, 1.0)
        for at, name in enumerate(names)
    }
    return Step(number, settings=[{"optimizer": "SGD", "group": 0.0, "lr": 0.1}], entries=entries, **more)


def write(path, steps, max_bytes=1 << 30):
    with file.Writer(path, ABOUT, max_bytes) as writer:
        for one in steps:
            writer.add(one)
    return path


def test_a_file_is_read_as_it_was_written_also_by_two_lines(tmp_path):
    steps = [step(1), step(2, 2**64 - 2), step(3, names=("a", "b", "c"))]
    path = write(tmp_path / "a", steps)
    found = file.read(path)
    assert list(found.steps.values()) == steps
    assert found.about["run"] == "train.py"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    digests = {row["step"]: row["digest"] for row in rows if "step" in row}
    assert digests == found.digests == {one.number: one.digest() for one in steps}


def test_the_entries_of_earlier_steps_are_not_read_if_nobody_wants_them(tmp_path, monkeypatch):
    steps = [step(number, number, names=("a", f"{number}")) for number in range(1, 6)]
    path = write(tmp_path / "a", steps)
    parsed = []
    monkeypatch.setattr(file, "settings_of", lambda rows: parsed.append(rows) or rows)
    found = file.read(path, 4)
    assert list(found.steps.values()) == steps[3:]
    assert list(found.digests) == [4, 5]
    assert len(parsed) == 2


def test_of_a_writer_that_was_killed_at_any_byte_all_whole_lines_count(tmp_path):
    path = write(tmp_path / "a", [step(1), step(2), step(3)])
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        if end < first:
            with pytest.raises(HookdError, match="not a fingerprint"):
                file.read(path)
        else:
            assert list(file.read(path).steps) == [
                n
                for n in (1, 2, 3)
                if f'"step":{n}' in "".join(whole[:end].decode().splitlines(keepends=True)[: whole[:end].count(b"\n")])
            ]


@pytest.mark.parametrize(
    "line",
    [b"{", b"[1]", b'{"step":1}', b'{"step":1,"digest":"x","entries":[[9,"0",0,0,0,0]]}', b'{"keys":[["x"]]}', b"\xff"],
)
def test_a_damaged_line_is_named(tmp_path, line):
    path = write(tmp_path / "a", [step(1)])
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(HookdError, match="line 4 is damaged"):
        file.read(path)


def test_entries_that_were_changed_do_not_agree_with_the_digest(tmp_path):
    path = write(tmp_path / "a", [step(1)])
    path.write_bytes(path.read_bytes().replace(b"0000000000000001", b"0000000000000005"))
    with pytest.raises(HookdError, match="does not agree"):
        file.read(path)


def test_a_file_keeps_to_its_size_the_digest_of_every_step_and_the_entries_of_some(tmp_path):
    most = 200_000
    path = write(tmp_path / "a", (step(number, number) for number in range(1, 3001)), most)
    assert path.stat().st_size <= most * 1.1
    found = file.read(path)
    assert list(found.digests) == list(range(1, 3001))
    whole = [number for number, one in found.steps.items() if one is not None]
    assert whole[0] == 1
    assert whole[-file.LAST :] == list(range(3001 - file.LAST, 3001))
    assert any(number % 100 == 0 for number in whole[1:20])
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_file_keeps_to_its_size_in_long_runs_and_with_shapes_that_change(tmp_path):
    most = 100_000
    with file.Writer(tmp_path / "a", ABOUT, most) as writer:
        for number in range(1, 8001):
            entries = {Key("data", "(root)", 0, "input 0", "float32", (number,)): Entry(number, 0, 1.0, 0.0, 1.0)}
            writer.add(Step(number, entries=entries))
    assert writer.size == (tmp_path / "a").stat().st_size <= most * 1.1
    found = file.read(tmp_path / "a")
    whole = [one for one in found.steps.values() if one is not None]
    assert [one.number for one in whole][-file.LAST :] == list(range(8001 - file.LAST, 8001))
    assert all(key.shape == (one.number,) for one in whole for key in one.entries)


@pytest.mark.parametrize("names", [30, 600])
def test_a_file_keeps_to_its_size_also_if_its_last_steps_are_larger_than_that(tmp_path, names):
    most = 30_000
    many = [step(number, number, names=[f"layers.{at}" for at in range(names)]) for number in range(1, 60)]
    path = write(tmp_path / "a", many, most)
    assert path.stat().st_size <= most
    found = file.read(path)
    assert list(found.digests) == list(range(1, 60))
    assert (found.steps[59] == many[-1]) is (names == 30)


def test_a_step_with_the_number_0_between_others_does_not_keep_the_writer(tmp_path):
    path = write(tmp_path / "a", [step(number, number) for number in (5, 0, *range(6, 60))], 5000)
    assert set(file.read(path).digests) == {0, *range(5, 60)}


def test_a_file_whose_first_line_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(file.os, "write", full)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(HookdError, match="No space left"):
        file.Writer(tmp_path / "a", ABOUT, 1 << 20)
    assert os.listdir("/proc/self/fd") == before
    assert not list(tmp_path.iterdir())


def test_a_file_that_was_deleted_meanwhile_is_an_error_of_hookd(tmp_path):
    with file.Writer(tmp_path / "a", ABOUT, 1) as writer:
        (tmp_path / "a").unlink()
        with pytest.raises(HookdError, match="No such file"):
            writer.add(step(1))


def test_what_was_dropped_is_said(tmp_path):
    many = [step(number, number) for number in range(1, 2001)]
    a = write(tmp_path / "a", many, 150_000)
    many[1002] = step(1003, 7)
    b = write(tmp_path / "b", many, 150_000)
    found = comparison.compare(file.read(a), file.read(b))
    assert (found.code, found.step) == (1, 1003)
    assert "were dropped" in found.sentence


def on_device(one):
    return replace(one, entries={key._replace(algorithm="mix64"): entry for key, entry in one.entries.items()})


def test_steps_without_entries_do_not_differ_because_their_digests_are_of_two_kinds(tmp_path):
    many = [step(number, number) for number in range(1, 2001)]
    a = file.read(write(tmp_path / "a", many, 150_000))
    b = file.read(write(tmp_path / "b", map(on_device, many), 150_000))
    assert b.steps[2000] == on_device(many[-1])
    found = comparison.compare(a, b)
    whole = sum(one is not None for one in a.steps.values())
    assert (found.code, found.compared) == (comparison.EQUAL, whole)
    kinds, dropped = found.notes
    assert "2 tensors of a step on a device" in kinds
    assert f"Of {2000 - whole} steps only digests were kept" in dropped
    many[-1] = replace(many[-1], entries={key: entry._replace(least=-2.0) for key, entry in many[-1].entries.items()})
    changed = file.read(write(tmp_path / "c", map(on_device, many), 150_000))
    found = comparison.compare(a, changed)
    assert (found.code, found.step) == (comparison.DIFFERENT, 2000)


def test_an_existing_file_is_not_overwritten(tmp_path):
    path = write(tmp_path / "a", [step(1)])
    with pytest.raises(HookdError, match="cannot write"):
        file.Writer(path, ABOUT, 1 << 20)
    assert file.read(path).steps


def test_files_without_a_common_step_cannot_be_compared(tmp_path):
    found = comparison.compare(
        file.read(write(tmp_path / "a", [step(1)])), file.read(write(tmp_path / "b", [step(2, 9)]))
    )
    assert found.code == comparison.INCOMPARABLE


@pytest.mark.parametrize("record", [b"", b"\xff\xff\xff\xff", b"\2\0\0\0{}", b"\4\0\0\0null", b"\x05\0\0\0[1,2]more"])
def test_a_record_that_is_no_step_is_an_error(record):
    with pytest.raises(HookdError, match="something else"):
        Decoder().step(record)


def test_after_an_attach_partial_steps_are_left_out_and_their_weights_are_those_before_the_next(tmp_path):
    def made(number, calls, *, has_weights=False):
        entries = {Key("forward", name, 0, "output 0", "float32", (2,)): Entry(1, 0, 1.0, 0.0, 1.0) for name in calls}
        entries |= {Key("update", "w", 0, "value", "float32", (2,)): Entry(10 + number, 0, 1.0, 0.0, 1.0)}
        if has_weights:
            entries |= {Key("weights", "w", 0, "value", "float32", (2,)): Entry(9 + number, 0, 1.0, 0.0, 1.0)}
        return Step(number, entries=entries)

    with file.Writer(tmp_path / "a", ABOUT, 1 << 30) as writer:
        received = recording.Received(writer, is_whole=False)
        received._decoder = SimpleNamespace(step=lambda one: one)
        for one in (made(5, "a", has_weights=True), made(6, "ab"), made(7, "abc"), made(8, "abc")):
            received.add(one)
        received.close()
    found = file.read(tmp_path / "a").steps
    assert list(found) == [7, 8]
    weights = {key.name: entry.bits for key, entry in found[7].entries.items() if key.phase == "weights"}
    assert weights == {"w": 16}


@pytest.mark.parametrize(
    ("states", "note"),
    [
        ([[1], [2]], []),
        ([[1, 5], [2, 6]], ["The random state of numpy differs; nothing that was computed depends on it."]),
    ],
)
def test_a_generator_from_which_nothing_draws_is_not_mentioned(tmp_path, states, note):
    paths = []
    for name, of in zip("ab", states, strict=True):
        steps = [step(number) for number in (1, 2)]
        for at, one in enumerate(steps):
            one.entries[Key("random", "", 0, "numpy", "", ())] = Entry(of[at % len(of)], 0, 0.0, 0.0, 0.0)
        paths.append(write(tmp_path / name, steps))
    found = comparison.compare(*map(file.read, paths))
    assert (found.code, found.notes) == (0, note)


def test_the_keys_that_a_process_sends_take_bounded_memory(monkeypatch):
    monkeypatch.setattr(steps, "_MOST_TEXT", 10_000)
    decoder = Decoder()
    keys = [["data", "x" * 900, call, "y" * 900, "float32", [1]] for call in range(3)]

    def record(at):
        head = {"step": 1, "is_absolute": False, "mark": 0, "settings": [], "unread": 0, "at": at, "keys": keys}
        data = json.dumps(head).encode()
        return len(data).to_bytes(4, "little") + data

    decoder.step(record(0))
    decoder.step(record(0))  # keys that are forgotten do not count
    with pytest.raises(HookdError, match="keys"):
        decoder.step(record(3))


@pytest.mark.parametrize(
    ("later", "is_absolute", "code"),
    [(40, False, comparison.INCOMPARABLE), (2, False, comparison.EQUAL), (40, True, comparison.DIFFERENT)],
)
def test_steps_that_count_from_the_attach_and_have_no_batch_in_common_are_not_called_different(
    tmp_path, later, is_absolute, code
):
    def written(name, first):
        batches = range(first, first + 5)
        many = [
            Step(
                number,
                is_absolute=is_absolute,
                entries={Key("data", "(root)", 0, "input 0", "float32", (2,)): Entry(batch, 0, 1.0, 0.0, 1.0)},
            )
            for number, batch in enumerate(batches, 5)
        ]
        return file.read(write(tmp_path / name, many))

    found = comparison.compare(written("a", 100), written("b", 100 + later))
    assert found.code == code
    assert ("unknown which steps" in found.sentence) is (code == comparison.INCOMPARABLE)
