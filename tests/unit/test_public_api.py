"""The public API is what `hookd.__all__` says, and all of it is documented."""

from __future__ import annotations

import inspect
import re
import types
from pathlib import Path

import pytest

import hookd
from hookd.api import hookspecs
from hookd.version import __version__

ROOT = Path(hookd.__file__).parent.parent


def test_all_names_exactly_what_is_exported():
    public = {name for name, value in vars(hookd).items() if not isinstance(value, types.ModuleType)}
    mine = {"annotations", "HookimplMarker"}  # what hookd.__init__ itself needs
    assert {name for name in public if not name.startswith("_")} - mine == set(hookd.__all__) - {"__version__"}


@pytest.mark.parametrize("name", sorted(set(hookd.__all__) - {"API_VERSION", "__version__", "hookimpl"}))
def test_every_public_name_says_what_it_is(name):
    text = inspect.getdoc(getattr(hookd, name))
    assert text, f"hookd.{name} has no docstring"
    assert text.splitlines()[0].endswith((".", ":")), "the first line is a sentence"


def test_the_reference_for_plugin_authors_has_every_hook_attribute_and_method():
    hooks = set(hookspecs.HOOKS)
    public = {name for kind in (hookd.Plugin, hookd.Context) for name in vars(kind) if not name.startswith("_")}
    pages = [(ROOT / "docs" / "reference" / name).read_text() for name in ("hooks.md", "api.md")]
    assert hooks | public <= set(re.findall(r"[`.](\w+)", "".join(pages)))


def test_the_version_is_one():
    assert hookd.__version__ == __version__
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", __version__)


def test_the_changelog_knows_this_version_or_what_is_unreleased():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert f"## [{__version__}]" in text or "## [Unreleased]" in text
