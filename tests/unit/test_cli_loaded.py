"""`hookd plugin list PID` on the plugins of a target's own environment."""

from __future__ import annotations

import pytest

from hookd.tool.attach import change
from hookd.tool.cli import loaded

THEIRS = [{"name": "broken", "entry": "hookd_broken:Broken", "version": "2"}, {"name": "widths", "entry": "hookd_widths:Widths", "version": "1"}]  # fmt: skip
WIDTHS = 'from hookd import Plugin\n\nclass Widths(Plugin):\n    """Counts."""\n    name = "widths"\n'


def test_one_that_cannot_be_carried_hides_no_other(tmp_path, monkeypatch):
    installed = tmp_path / "site" / "hookd_broken-2.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: hookd-broken\nVersion: 2\n")
    (installed / "entry_points.txt").write_text("[hookd.plugins]\nbroken = hookd_broken:Broken\n")
    (tmp_path / "hookd_widths.py").write_text(WIDTHS)
    monkeypatch.syspath_prepend(installed.parent)
    monkeypatch.setattr(change, "environment", lambda _pid: THEIRS)  # an agent's answer
    broken, widths = loaded._installed(4711, [tmp_path])
    assert "cannot be found" in broken.refused
    assert loaded._installed_line(broken, 4711) == (
        f"broken 2 is installed in the target; the one here cannot be sent there: {broken.refused}"
    )
    assert widths.shadowed_by["origin"] == str(tmp_path / "hookd_widths.py")


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("running", "`hookd plugin config 4711 NAME"),
        ("detached", "process 4711 is detached: these plugins were loaded"),
    ],
)
def test_options_are_changed_of_a_process_that_has_an_agent(monkeypatch, capsys, state, words):
    monkeypatch.setattr(change, "environment", lambda _pid: [])
    loaded.loaded({"pid": 4711, "plugins": [], "state": state}, (), as_json=False)
    assert capsys.readouterr().err.startswith(words)
