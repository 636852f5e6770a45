"""The command itself, whatever it is told to do."""

from __future__ import annotations

import io
import sys

from hookd.tool.cli import main


def test_a_terminal_that_cannot_show_a_character_is_shown_the_rest(monkeypatch):
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    assert main(["plugin", "list"]) == 0
    print("5 µs")
    sys.stdout.flush()
    assert b"activations" in shown.getvalue()
    assert shown.getvalue().endswith(b"5 ?s\n")
