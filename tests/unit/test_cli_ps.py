"""The processes that `hookd ps` lists, and its form of a command line."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from hookd.tool.attach.discover import LAUNCHER, Candidate
from hookd.tool.cli.ps import command, ps

LONG = "/home/somebody/with/a/long/name/projects/vision/experiments/train.py"


@pytest.mark.parametrize(
    ("cmdline", "reported"),
    [
        (["/opt/envs/train/bin/python3.11", "-u", "train.py", "--lr", "1"], "python3.11 -u train.py --lr 1"),
        (["python", "/srv/train.py", "--lr", "1"], "python /srv/train.py --lr 1"),
        (["/usr/bin/python", "-u", LONG, "--lr", "0.001"], "python -u …/train.py --lr 0.001"),
        (["/usr/bin/python", "-m", "pkg.train", "--seed", "3"], "python -m pkg.train --seed 3"),
        (["/usr/bin/python", LONG, "--data", "x" * 90], f"python …/train.py --data {'x' * 44}…"),
        (["/usr/bin/python", "-c", "import torch\nwork()"], "python -c import torch work()"),
        (["ray::RayTrainWorker.run /a/b"], "ray::RayTrainWorker.run /a/b"),
        ([], ""),
    ],
)
def test_the_script_and_its_arguments_are_seen(cmdline, reported):
    assert command(cmdline, 70) == reported


STRANGER = 4_000_000_001
DISABLED = Candidate(11, 1, ("python", "train.py"), 0, "skipped", "HOOKD_DISABLE is set")
WORKER = Candidate(12, 1, ("python", "train.py"), STRANGER, "skipped", "a data loader's worker")


@pytest.fixture
def listed(monkeypatch):
    """Return a function that runs `hookd ps` as if these processes had torch: `listed(candidates, *words)` returns its output."""

    def run(candidates, *words):
        monkeypatch.setattr("hookd.tool.attach.discover.candidates", lambda: list(candidates))
        done = CliRunner().invoke(ps, words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout, done.stderr

    return run


def test_where_all_are_skipped_it_says_how_many_and_why(listed):
    _, said = listed([DISABLED, WORKER])
    assert "these were skipped" in said
    assert "skipped 11: HOOKD_DISABLE is set" in said
    assert "skipped 12: a data loader's worker" in said
    assert "no process that is visible to you has loaded torch" in listed([])[1]


def test_the_processes_of_one_user_can_be_asked_for(listed):
    words = ("--all", "--json", "--user")
    pids = [
        [row["pid"] for row in json.loads(listed([DISABLED, WORKER], *words, user)[0])["processes"]]
        for user in ("root", "0", str(STRANGER))
    ]
    assert pids == [[11], [11], [12]]
    _, said = listed([DISABLED, WORKER], "--user", str(STRANGER))
    assert f"no process of user {STRANGER} can be attached to" in said
    assert "11" not in said
    _, said = listed([DISABLED], "--user", str(STRANGER))
    assert f"no process of user {STRANGER} that is visible to you has loaded torch" in said


def test_the_launcher_of_a_rank_is_the_nearest_above_it(listed, monkeypatch):
    rank, *launchers = (
        Candidate(23, 3, ("python", "train.py"), 0, "attachable"),
        *(Candidate(pid, 1, ("torchrun", "train.py"), 0, "skipped", LAUNCHER) for pid in (21, 22)),
    )
    monkeypatch.setattr("hookd.tool.attach.process_tree.above", lambda pid: list(range(pid - 1, 0, -1)))
    (row,) = json.loads(listed([rank, *launchers], "--json")[0])["processes"]
    assert row["launcher"] == 22
    assert "a rank of 22 (--tree)" in " ".join(listed([rank, *launchers])[0].split())
