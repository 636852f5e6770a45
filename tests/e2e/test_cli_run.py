"""`hookd run` as a user types it: the command's own status, and its metrics while it runs."""

from __future__ import annotations

import signal
import urllib.request
from pathlib import Path

import pytest

from tests.support.environment import REPOSITORY, TARGETS, bare_python, target_environment
from tests.support.processes import Process, wait_until
from tests.support.tool import Metrics, hookd_json, start_hookd

TRAIN = REPOSITORY / "examples" / "train.py"
FORKS = TARGETS / "forks.py"
NOBODY = "hookd: no process of this command was observed: none imported torch, or PYTHONPATH lost hookd's directory (env -i, python -I)"


def run(*words: str | Path, stdin: bool = False) -> Process:
    return start_hookd("run", *words, stdin=stdin)


def scrape(url: str) -> Metrics:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return Metrics(answer.read().decode())


@pytest.mark.parametrize(("code", "status"), [("exit 0", 0), ("exit 7", 7), ("kill -TERM $$", -signal.SIGTERM)])
def test_the_exit_code_is_the_commands(code, status):
    with run("--", "sh", "-c", code) as process:
        assert process.wait() == status, process.describe()


def test_words_of_the_command_need_no_dashes_before_them():
    with run("sh", "-c", "echo $0 --json", "hello") as process:
        assert process.finish() == ["hello --json"]


@pytest.mark.parametrize(
    "words", [["--", "no-such-command"], ["-p", "nam", "--", "true"], ["--match", "x", "--", "true"]], ids=" ".join
)
def test_what_cannot_be_run_exits_2(words):
    with run(*words) as process:
        assert process.wait() == 2, process.describe()
        assert process.err[0].startswith("hookd: error: ")


def test_listen_serves_the_command_and_a_signal_ends_it():
    with run("--run", "trial", "--listen", "127.0.0.1:0", "--", bare_python(), TRAIN) as process:
        url = process.expect(r"http://127\.0\.0\.1:[1-9]\d*/metrics").group()

        def steps() -> float:
            return scrape(url).total("hookd_steps_total", run="trial", rank="0")

        wait_until(lambda: steps() > 2, what="steps in the metrics")
        (pid,) = scrape(url).labels("hookd_target_info", "pid")
        assert hookd_json("report", pid)["step"]["offset"] == 0  # all its steps were seen
        process.signal(signal.SIGTERM)  # goes to the script, which ends in its own way
        assert process.wait() == 0, process.describe()
        assert process.out[-1].startswith("done ")


def test_an_address_that_is_taken_is_reported_before_anything_runs():
    with run("--listen", "127.0.0.1:0", "--", "cat", stdin=True) as first:
        address = first.expect(r"http://(127\.0\.0\.1:[1-9]\d*)/metrics").group(1)
        with run("--listen", address, "--", "echo", "ran") as second:
            assert second.wait() == 1, second.describe()
            assert not second.out
            assert "--listen" in "\n".join(second.err)


@pytest.mark.load
def test_without_listen_the_command_is_served_all_the_same():
    with run("--", bare_python(), TRAIN) as process:
        url = process.expect(r"http://127\.0\.0\.1:[1-9]\d*/metrics").group()
        wait_until(lambda: scrape(url).total("hookd_steps_total") > 0, what="the command's steps")
        process.signal(signal.SIGTERM)
        assert process.wait() == 0, process.describe()
        assert NOBODY not in process.err


@pytest.mark.parametrize(
    "words",
    [["env", "-i"], *(pytest.param(one, marks=pytest.mark.load) for one in (["env", "PYTHONPATH="], []))],
    ids=" ".join,
)
def test_a_command_in_which_nobody_was_watched_says_so_at_its_end(words):
    isolated = [] if words else ["-I"]
    with run("--", *words, bare_python(), *isolated, "-c", "import torch; print('ran')") as process:
        assert process.finish() == ["ran"]
        assert process.err[1:] == [NOBODY]


def test_an_address_that_is_taken_by_default_does_not_keep_the_command_from_running():
    with run("--listen", "127.0.0.1:0", "--", "cat", stdin=True) as first:
        address = first.expect(r"http://(127\.0\.0\.1:[1-9]\d*)/metrics").group(1)
        with start_hookd("run", "--", "sh", "-c", "echo ran; exit 3", HOOKD_LISTEN=address) as second:
            assert second.wait() == 3, second.describe()
            assert second.out == ["ran"]
            assert "are not served" in second.err[0]


def test_a_daemon_that_runs_serves_the_command(tmp_path):
    control = tmp_path / "control.sock"
    options = ("--control", control, "--state-dir", tmp_path, "--listen", "127.0.0.1:0")
    with start_hookd("serve", *options) as daemon:
        url = daemon.expect(r"http://127\.0\.0\.1:\d+/metrics").group()
        wait_until(control.exists)
        with start_hookd("run", "--", "echo", "ran", HOOKD_CONTROL=control) as process:
            assert process.finish() == ["ran"]
            assert process.err == [f"metrics on {url}, by the daemon that runs here", NOBODY]


def test_a_named_daemon_that_does_not_answer_does_not_keep_the_command_from_running(tmp_path):
    host = f"unix://{tmp_path}/none.sock"
    with start_hookd("run", "--", "sh", "-c", "echo ran; exit 3", HOOKD_HOST=host) as process:
        assert process.wait() == 3, process.describe()
        assert process.out == ["ran"]
        assert process.err[0].startswith(f"hookd: warning: no daemon answers on {tmp_path}/none.sock")
        assert process.err[1].startswith("metrics on http://127.0.0.1:")


def test_a_host_that_is_none_is_wrong_usage():
    with start_hookd("run", "--", "true", HOOKD_HOST="tcp://here:1") as process:
        assert process.wait() == 2, process.describe()


@pytest.mark.load
def test_forked_ranks_have_agents_of_their_own_and_bystanders_have_none():
    with Process([bare_python(), FORKS], env=target_environment(), stdin=True) as plain:
        without = sorted(plain.expect(rf"rank {rank} \S+").group() for rank in (0, 1))
        plain.send("end")
        plain.finish()
    with run("--", bare_python(), FORKS, stdin=True) as process:
        url = process.expect(r"http://127\.0\.0\.1:[1-9]\d*/metrics").group()
        pids = process.expect(r"^pids (\d+) (\d+) (\d+)").groups()

        def steps() -> list[float]:
            found = scrape(url)
            return [found.total("hookd_steps_total", run="forks.py", rank=rank) for rank in ("0", "1")]

        wait_until(lambda: steps() == [5.0, 5.0], what=lambda: scrape(url).text)
        assert scrape(url).labels("hookd_target_info", "pid", world_size="2") == set(pids[:2])
        assert pids[2] not in scrape(url).labels("hookd_target_info", "pid")
        assert scrape(url).labels("hookd_steps_total", "rank") == {"0", "1", "launcher"}
        assert sorted(process.expect(rf"rank {rank} \S+").group() for rank in (0, 1)) == without
        process.send("end")
        process.finish()
        assert not [line for line in process.err if "not watched" in line]


OLD = sorted(Path.home().glob(".pyenv/versions/[23].[0-9].*/bin/python"))
"""Interpreters that hookd does not serve, where somebody has some."""


@pytest.mark.parametrize("python", OLD or [None], ids=lambda path: path.parts[-3] if path else "none")
def test_a_python_that_cannot_be_served_notices_nothing(python):
    if python is None:
        pytest.skip("no interpreter older than 3.10 below ~/.pyenv/versions")
    words = "import sys; print([path for path in sys.path if 'hookd' in path], len(sys.meta_path))"
    with Process([python, "-c", words], env=target_environment()) as plain:
        expected = plain.finish()
    with run("--", python, "-W", "error", "-c", words) as process:
        assert process.finish() == expected
        assert process.err[1:] == [NOBODY]  # and before it hookd's own word on where the metrics are


def test_the_help_shows_what_makes_sense_for_a_command():
    with run("--help") as process:
        text = "\n".join(process.finish())
    assert "--listen" in text
    assert not [word for word in ("--tree", "--match", "--timeout", "--keep", "--force") if word in text]
