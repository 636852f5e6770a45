"""The manual pages: one for each command, which `man` shows without a warning and as it is written."""

from __future__ import annotations

import runpy
import sys

import pytest

from hookd.tool.cli import cli
from tests.support.deployment import ROOT, run
from tests.support.documents import generator


@pytest.fixture
def directory(tmp_path):
    code, output = run(sys.executable, ROOT / "docs/man_pages.py", tmp_path / "man1")
    assert code == 0, output
    return tmp_path / "man1"


def shown(page):
    """Return what `man` shows, without its bold and its line breaks."""
    code, output = run("groff", "-man", "-Tascii", "-P-cbou", page)
    assert code == 0, output
    return " ".join(output.split())


def test_every_command_has_a_page_that_roff_accepts(directory):
    commands = {"-".join(words) for words, _ in generator().walk(cli, ("hookd",))}
    assert {path.stem for path in directory.iterdir()} == {"hookd", *commands}
    code, output = run("groff", "-man", "-Tutf8", "-ww", "-z", *sorted(directory.iterdir()))
    assert (code, output) == (0, "")


def test_a_page_has_usage_options_and_exit_codes(directory):
    text = shown(directory / "hookd-attach.1")
    assert "hookd-attach - Attach to running processes and serve their metrics" in text
    assert "SYNOPSIS hookd attach [OPTIONS] PID" in text
    assert "--keep Leave the agent in the target when hookd ends." in text
    assert "5 permission denied" in text
    assert "SEE ALSO hookd(1)" in text


def test_the_first_page_has_the_commands_and_keeps_lines_that_belong_together(directory):
    assert "hookd-attach(1) Attach to running processes" in shown(directory / "hookd.1")
    assert "\nhookd top                all of them, live\n.EE\n" in (directory / "hookd.1").read_text()


def test_what_roff_would_take_for_its_own_is_shown_as_it_is(directory):
    text, page = ".B is -x in `a\\b` ~/^", directory / "odd.1"
    escaped = runpy.run_path(str(ROOT / "docs/man_pages.py"))["escaped"]
    page.write_text("\n".join([".TH odd 1", ".SH NAME", escaped(text), ""]))
    assert text in shown(page)
