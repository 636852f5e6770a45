"""The command itself, whatever it is told to do."""

from __future__ import annotations

import io
import sys

import pytest

from hookd.tool.cli import main


@pytest.mark.parametrize("word", ["\u0663", "9" * 5000])
def test_a_pid_has_ascii_digits_and_no_more_than_a_number_of_64_bits(word, capsys):
    assert main(["detach", word]) == 2
    assert "is not a process id" in capsys.readouterr().err
    assert main(["report", f"#{word}"]) == 2
    assert "is not an incident number" in capsys.readouterr().err


def test_a_terminal_that_cannot_show_a_character_is_shown_the_rest(monkeypatch):
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    assert main(["plugin", "list"]) == 0
    print("5 µs")
    sys.stdout.flush()
    assert b"activations" in shown.getvalue()
    assert shown.getvalue().endswith(b"5 ?s\n")
