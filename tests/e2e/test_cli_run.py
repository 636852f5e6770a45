"""`hookd run` as a user types it: the command's own status, and its metrics while it runs."""

from __future__ import annotations

import signal
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.support.environment import REPOSITORY, bare_python, tool_environment
from tests.support.processes import Process, wait_until
from tests.support.tool import Metrics

TRAIN = REPOSITORY / "examples" / "train.py"
CONSOLE = Path(sys.executable).with_name("hookd")

pytestmark = pytest.mark.skipif(not CONSOLE.exists(), reason="hookd is not installed here")


def run(*words: str | Path, stdin: bool = False) -> Process:
    return Process([CONSOLE, "run", *words], env=tool_environment(), stdin=stdin)


@pytest.mark.parametrize(("code", "status"), [("exit 0", 0), ("exit 7", 7), ("kill -TERM $$", 143)])
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
            with urllib.request.urlopen(url, timeout=10) as answer:
                return Metrics(answer.read().decode()).total("hookd_steps_total", run="trial", rank="0")

        wait_until(lambda: steps() > 2, what="steps in the metrics")
        process.signal(signal.SIGTERM)  # goes to the script, which ends in its own way
        assert process.wait() == 0, process.describe()
        assert process.out[-1].startswith("done ")


def test_an_address_that_is_taken_is_told_before_anything_runs():
    with run("--listen", "127.0.0.1:0", "--", "cat", stdin=True) as first:
        address = first.expect(r"http://(127\.0\.0\.1:[1-9]\d*)/metrics").group(1)
        with run("--listen", address, "--", "echo", "ran") as second:
            assert second.wait() == 1, second.describe()
            assert not second.out
            assert "--listen" in "\n".join(second.err)
