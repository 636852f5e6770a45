"""How `hookd demo` waits for a process: as long as it gets on, and not for ever."""

from __future__ import annotations

import sys

import pytest

from hookd.errors import HookdError
from hookd.tool.cli import demo, program

SLOW = "import time\nfor n in range(16):\n    print('step', n, flush=True)\n    time.sleep(0.25)\nprint('done')"


def python(code):
    return [sys.executable, "-c", code]


def test_a_slow_process_is_waited_for_as_long_as_it_gets_on(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(program, "PATIENCE_S", 2.0)
    monkeypatch.setattr(program, "TELL_S", 1.0)
    with program.started(python(SLOW), tmp_path / "slow") as slow:
        assert slow.line("^done$", "the end of the training")[0] == "done"
    output = capfd.readouterr().err
    assert "slow: waiting for the end of the training" in output
    assert "now at 'step " in output


def test_one_that_prints_nothing_is_given_up_in_words(tmp_path, monkeypatch):
    monkeypatch.setattr(program, "PATIENCE_S", 0.2)
    code = python("import time; time.sleep(600)")
    with program.started(code, tmp_path / "still") as still, pytest.raises(HookdError) as caught:
        still.line(r"^done (\d+)$", "the end of the training")
    assert "s for the end of the training" in caught.value.message
    assert "busy" in caught.value.hint


def test_one_that_gets_on_without_getting_there_is_given_up_too(tmp_path, monkeypatch):
    monkeypatch.setattr(program, "LONGEST_S", 1.0)
    with program.started(python(SLOW), tmp_path / "slow") as slow, pytest.raises(HookdError, match="the fault"):
        slow.line("^fault$", "the fault")


def test_the_next_command_is_one_that_works(tmp_path, monkeypatch):
    script = tmp_path / "my env" / "bin" / "hookd"
    script.parent.mkdir(parents=True)
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.setenv("PATH", "/nowhere")
    assert demo.command() == f"'{script}'"
    monkeypatch.chdir(tmp_path)
    assert demo.command() == "'my env/bin/hookd'"
    monkeypatch.setenv("PATH", str(script.parent))
    assert demo.command() == "hookd"
    monkeypatch.setattr(sys, "argv", ["/lib/hookd/__main__.py"])
    assert demo.command() == f"{sys.executable} -m hookd"
