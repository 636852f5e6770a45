"""`hookd plugin check` where it runs plugins: all of a folder in one go, each for itself."""

from __future__ import annotations

import json

from hookd.testing import measure
from hookd.tool.check import types
from hookd.tool.cli import main


def test_check_tries_all_plugins_of_a_folder_and_each_mistake_has_its_line(tmp_path, capsys, monkeypatch):
    head = "from hookd import Plugin, hookimpl\n{more}\nclass Tried(Plugin):\n    name = '{name}'\n\n    @hookimpl\n"
    sources = {
        "absent": ("import nowhere", "def step_post(self):\n        pass\n"),
        "attends": (
            "from torch.nn import MultiheadAttention",
            (
                "def forward(self, module):\n        pass\n\n    @hookimpl\n"
                "    def select(self, module):\n        return isinstance(module.torch(), MultiheadAttention)\n"
            ),
        ),
        "ends": ("import os", "def step_post(self):\n        os._exit(3)\n"),
        "never": (
            "",
            "def forward(self):\n        pass\n\n    @hookimpl\n    def select(self, module):\n        return False\n",
        ),
    }
    for name, (more, body) in sources.items():
        (tmp_path / f"hookd_{name}.py").write_text(head.format(more=more, name=name) + f"    {body}")
    monkeypatch.setattr(types, "is_possible", lambda: False)
    assert main(["plugin", "check", str(tmp_path), "--json"]) == 1
    output = {one["plugin"]: one for one in json.loads(capsys.readouterr().out)["plugins"]}
    errors = {
        name: [(one["line"], one["rule"], one["message"]) for one in report["problems"] if not one["is_warning"]]
        for name, report in output.items()
    }
    assert errors["absent"] == [(2, "refused", "ModuleNotFoundError: No module named 'nowhere'")]
    assert errors["ends"] == [(3, "refused", "the process ended with 3 while it was tried")]
    assert not errors["attends"]
    assert output["attends"]["hooks"]["forward"]["calls"] >= measure.STEPS
    assert not output["attends"]["uncalled"]
    assert not errors["never"]
    assert output["never"]["uncalled"] == ["forward"]
