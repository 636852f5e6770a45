"""The file of a fingerprint: bounded, checked on reading, and whole up to its last line however the writer ended."""

from __future__ import annotations

import json

import pytest

from hookd.errors import HookdError
from hookd.tool.fingerprints import comparison, file
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


def test_what_was_dropped_is_said(tmp_path):
    many = [step(number, number) for number in range(1, 2001)]
    a = write(tmp_path / "a", many, 150_000)
    many[1002] = step(1003, 7)
    b = write(tmp_path / "b", many, 150_000)
    found = comparison.compare(file.read(a), file.read(b))
    assert (found.code, found.step) == (1, 1003)
    assert "were dropped" in found.sentence


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
