"""`hookd diff`: its exit codes, and what it leaves when it is ended."""

from __future__ import annotations

import fcntl
import os
import signal
import tempfile
from types import SimpleNamespace

import pytest

from hookd.errors import AttachError, NoSuchTarget
from hookd.tool.attach import discover
from hookd.tool.cli import diff, fingerprint, main
from hookd.tool.fingerprints import file, live
from hookd.tool.fingerprints.steps import Entry, Key, Step
from hookd.tool.linux import proc


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Return a function that writes the file of a process instead of recording it; no daemon runs."""

    def record(path, steps, **about):
        with file.Writer(path, {"run": "train.py", **about}, 1 << 20) as writer:
            for number in steps:
                entries = {Key("data", "(root)", 0, "input 0", "float32", (2,)): Entry(number, 0, 1.0, 0.0, 1.0)}
                writer.add(Step(number, is_absolute=True, entries=entries))
        return SimpleNamespace(steps=writer.steps, is_ended=False, is_detached=False)

    monkeypatch.setattr(fingerprint, "kept_of", lambda *_: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    return record


def test_a_file_that_cannot_be_read_is_not_called_different_and_nothing_is_recorded_before(
    tmp_path, record, monkeypatch, capsys
):
    monkeypatch.setattr(live, "record_together", lambda *_: pytest.fail("recorded"))
    (tmp_path / "foreign").write_text("no fingerprint\n")
    assert main(["diff", "7", str(tmp_path / "foreign")]) == 2
    assert "not a fingerprint" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "code"), [(AttachError("timeout"), 2), (NoSuchTarget("there is no process 7"), 4)])
def test_an_attach_that_fails_is_not_called_different(record, monkeypatch, error, code):
    def fail(*_):
        raise error

    monkeypatch.setattr(live, "record_together", fail)
    assert main(["diff", "7", "8"]) == code


def test_a_process_that_ended_early_and_steps_that_do_not_meet_are_said(record, monkeypatch, capsys):
    def together(paths, _):
        assert [path.name for path in paths.values()] == ["7", "8"]
        found = [record(paths[7], range(3, 6), pid=7), record(paths[8], range(26, 29), pid=8)]
        found[1].is_ended = True
        return found

    monkeypatch.setattr(live, "record_together", together)
    assert main(["diff", "07", "8"]) == 2
    out, err = capsys.readouterr()
    assert "of process 8 only 3 steps were recorded: it has ended" in err
    assert "Record more steps: A comes to the first step of the other file 21 steps later." in out


def test_sigterm_undoes_what_was_begun(tmp_path, record, monkeypatch):
    undone = []

    def together(paths, _):
        try:
            record(paths[7], [1])
            os.kill(os.getpid(), signal.SIGTERM)
            pytest.fail("not ended")
        finally:
            undone.append(True)

    monkeypatch.setattr(live, "record_together", together)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"):
        main(["diff", "7", "8"])
    assert undone
    assert not list((tmp_path / "scratch").iterdir())
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(("lives", "compared"), [(False, 2), (True, 1)])
def test_a_file_is_read_once_the_companion_of_a_command_that_has_ended_has_written_it(
    tmp_path, monkeypatch, capsys, lives, compared
):
    path = tmp_path / "a.jsonl"
    with file.Writer(path, {"run": "train.py", "pid": 7}, 1 << 20) as writer:

        def add(number):
            writer.add(
                Step(
                    number,
                    is_absolute=True,
                    entries={Key("data", "", 0, "input 0", "float32", ()): Entry(1, 0, 1.0, 0.0, 1.0)},
                )
            )

        def pause(_):
            add(2)
            fcntl.flock(writer._fd, fcntl.LOCK_UN)

        add(1)
        monkeypatch.setattr(proc, "has_ended", lambda pid: not (pid == 7 and lives))
        monkeypatch.setattr(diff.time, "sleep", pause)
        assert main(["diff", str(path), str(path)]) == 0
    assert f"Equal in {compared} step" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [("--tolerance", "nan"), ("--tolerance", "4"), ("--what", ""), ("--map", "="), ("--map", "a=")]
)
def test_values_that_mean_nothing_are_refused(tmp_path, record, words):
    record(tmp_path / "a", [1])
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "a"), *words]) == 2


def test_a_name_that_nothing_has_and_a_file_without_steps_are_said(tmp_path, record, capsys):
    record(tmp_path / "a", [1])
    record(tmp_path / "none", [])
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "a"), "--map", "heat=head"]) == 0
    assert "A has no module heat, which B would call head." in capsys.readouterr().out
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "none")]) == 2
    assert "No step was recorded in B." in capsys.readouterr().out


def test_a_command_that_cannot_be_run_twice_is_not_called_different(capfd):
    assert main(["fingerprint", "--twice", "--", "false"]) == 2
    for words, why in (
        (("--modules", "a,b"), "cannot have a comma"),
        (("--max-size", "256"), "--max-size and --timeout"),
    ):
        assert main(["fingerprint", "--twice", *words, "--", "false"]) == 2
        assert why in capfd.readouterr().err


def test_all_trainings_of_a_command_that_is_run_twice_are_compared(tmp_path, record):
    """The second of a rank has its pid in its file's name, which is another one in each run."""
    for run, second, began in (("a", 7, 2.0), ("b", 8, 3.0)):
        (tmp_path / run).mkdir()
        record(tmp_path / run / f"run-{second}.jsonl", [second], began=began)
        record(tmp_path / run / "run.jsonl", [1], began=1.0)
        record(tmp_path / run / "run-rank10.jsonl", [1], rank=10)
        record(tmp_path / run / "run-rank11.jsonl", [1, 2] if run == "a" else [1, 2, 3], rank=11)
        record(tmp_path / run / "run-rank2.jsonl", [1] if run == "a" else [], rank=2)
    found = fingerprint._compared_runs(tmp_path / "a", tmp_path / "b")
    assert [(name, one["code"]) for name, one in found] == [
        ("rank 0, training 1", 0), ("rank 0, training 2", 2), ("rank 2", 1), ("rank 10", 0), ("rank 11", 1)
    ]  # fmt: skip
    assert found[2][1]["sentence"] == "Only the first run has this training (rank 2)."
    assert found[4][1]["sentence"] == "Equal in 2 steps; then only the second run goes on, to step 3."


def test_runs_of_which_a_rank_parts_are_called_different_also_if_another_cannot_be_compared(monkeypatch, capsys):
    found = [("rank 0", {"code": 2}), ("rank 1", {"code": 1})]
    monkeypatch.setattr(fingerprint, "_run", lambda _: 0)
    monkeypatch.setattr(fingerprint, "_compared_runs", lambda *_: found)
    assert main(["fingerprint", "--twice", "--json", "--", "true"]) == 1
    assert capsys.readouterr().out


def test_a_process_of_another_user_is_explained(tmp_path, monkeypatch, capsys):
    def refuse(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(discover, "identity", refuse)
    assert main(["fingerprint", str(os.getpid()), "-o", str(tmp_path / "a")]) == 5
    assert f"process {os.getpid()}" in capsys.readouterr().err
