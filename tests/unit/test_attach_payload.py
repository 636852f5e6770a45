"""The payload: what is in it, and how plugins are found without being imported."""

from __future__ import annotations

import ast
import io
import sys
import zipfile

import pytest

from hookd.attach import payload
from hookd.config import PluginSpec
from hookd.errors import PluginError

PLUGIN = """
raise RuntimeError("imported")
import hookd

class Widths(hookd.Plugin):
    name = "widths"
"""


def test_the_payload_holds_the_agents_half_and_a_private_pluggy_only():
    with zipfile.ZipFile(io.BytesIO(payload.build(()).archive)) as archive:
        names = set(archive.namelist())
    assert {"hookd/__init__.py", "hookd/agent/bootstrap.py", "hookd/hookspecs.py", "hookd/_pluggy/__init__.py"} <= names
    assert not {name for name in names if name.startswith(("hookd/attach", "hookd/cli", "hookd/daemon", "pluggy"))}
    assert "hookd/_pluggy.py" not in names
    assert "hookd/config.py" not in names


def test_the_same_sources_give_the_same_bytes():
    assert payload.build(()).sha256 == payload.build(()).sha256


@pytest.mark.parametrize("path", ["mine.py", "mine/__init__.py"])
def test_a_plugin_in_a_directory_is_found_by_the_name_that_its_class_sets(tmp_path, path):
    file = tmp_path / path
    file.parent.mkdir(exist_ok=True)
    file.write_text(PLUGIN)
    built = payload.build((PluginSpec("widths", {"every": "3"}),), (tmp_path,))
    assert built.plugins == ({"name": "widths", "entry": "mine:Widths", "options": {"every": "3"}, "by_name": True},)
    assert built.sources[0].files == {path: PLUGIN.encode()}
    assert "mine" not in sys.modules


def test_an_installed_plugin_is_found_without_importing_it():
    source = payload.find("nan")
    assert source.entry.startswith("hookd_nan:")
    assert any(path.startswith("hookd_nan") for path in source.files)


def test_an_unknown_plugin_is_refused_with_the_names_that_there_are():
    with pytest.raises(PluginError) as caught:
        payload.find("nun")
    assert caught.value.reason == "unknown-plugin"
    assert "nan" in caught.value.hint


LONG_TEXT = 'text = """' + "x\n" * 40 + '"""'
PIECES = f"import functools\n{LONG_TEXT}\n@functools.cache\n@functools.wraps(print)\ndef f():\n    pass\n"


def test_a_source_is_cut_between_statements_only_and_means_the_same():
    cut = payload.in_pieces(PIECES.encode())
    assert cut.count(b"\f") == 3
    assert b"\n\f\f\f@functools.cache\n" in cut
    assert ast.dump(ast.parse(cut), include_attributes=False) == ast.dump(ast.parse(PIECES))
    assert payload.in_pieces(cut) == cut


@pytest.mark.parametrize("source", [b"class :", b"# coding: latin-1\nx = '\xe4'\n", b"x = 1\0"])
def test_a_source_that_cannot_be_read_here_is_left_in_one_piece(source):
    assert payload.in_pieces(source) == source


def test_a_plugin_that_is_no_python_is_refused(tmp_path):
    (tmp_path / "broken.py").write_text("class :")
    with pytest.raises(PluginError, match=r"broken\.py"):
        payload.find("widths", (tmp_path,))
