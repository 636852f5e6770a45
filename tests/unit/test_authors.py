"""Which line of a plugin's author is reported."""

from __future__ import annotations

import importlib.util
import sys
import threading

import pytest

from hookd.api.globs import Globs
from hookd.errors import PluginError
from hookd.wire.plugin_frames import author_line, author_place, line_at

SOURCE = """
import json

class Widths:
    def calls(self, act):
        act()

    def reads(self):
        json.loads("{")

    def imports(self):
        import hookd_that_there_is_not
"""


@pytest.fixture
def made(tmp_path):
    """A plugin's module."""
    path = tmp_path / "hookd_widths.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("hookd_widths", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def raised(act, *arguments) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        act(*arguments)
    return caught.value


def test_it_is_the_last_one_in_the_plugins_package(made):
    error = raised(made.Widths().reads)
    assert author_line(error, made.Widths()) == f'{made.__file__}:9, in reads: json.loads("{{")'
    assert author_place(error, made.Widths()) == f" ({made.__file__}:9)"
    assert "/json/" in author_line(error), "of nobody's package: the last one"


def test_it_is_never_hookds_nor_the_import_systems(made):
    error = raised(made.Widths().calls, lambda: Globs.matches(None, ""))
    assert author_line(error).startswith(f"{__file__}:")
    assert author_line(error, made.Widths()) == f"{made.__file__}:6, in calls: act()"
    assert (
        author_line(raised(made.Widths().imports)) == f"{made.__file__}:12, in imports: import hookd_that_there_is_not"
    )
    assert author_line(PluginError("never raised")) == author_place(PluginError("never raised")) == ""


def test_a_thread_is_at_the_last_one(made):
    ready, go = threading.Event(), threading.Event()

    def waits():
        ready.set()
        go.wait()

    thread = threading.Thread(target=made.Widths().calls, args=(waits,))
    thread.start()
    try:
        assert ready.wait(60)
        assert line_at(sys._current_frames()[thread.ident], made.Widths()) == f"{made.__file__}:6, in calls: act()"
        assert line_at(None) == ""
    finally:
        go.set()
        thread.join()
