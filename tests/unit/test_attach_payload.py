"""The payload: its content, and how plugins are found without being imported."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

import pytest

from hookd.errors import PluginError
from hookd.target.boot import stub
from hookd.tool.attach import payload, sources
from hookd.tool.config import PluginSpec
from tests.support.environment import REPOSITORY

PLUGIN = """
raise RuntimeError("imported")
import hookd

class Widths(hookd.Plugin):
    name = "widths"
"""


def test_the_payload_holds_the_agents_half_and_a_private_pluggy_only():
    names = set(stub.unpack(payload.build(()).archive))
    assert {
        "hookd/__init__.py",
        "hookd/target/boot/bootstrap.py",
        "hookd/api/hookspecs/calls.py",
        "hookd/_pluggy/__init__.py",
    } <= names
    assert not {
        name
        for name in names
        if name.startswith(("hookd/tool", "hookd/testing", "hookd/integrations", "hookd/serving", "pluggy"))
    }
    assert "hookd/_pluggy.py" not in names


def test_the_same_sources_give_the_same_bytes():
    assert payload.build(()).sha256 == payload.build(()).sha256


@pytest.mark.parametrize("path", ["mine.py", "mine/__init__.py"])
def test_a_plugin_in_a_directory_is_found_by_the_name_that_its_class_sets(tmp_path, path):
    file = tmp_path / path
    file.parent.mkdir(exist_ok=True)
    file.write_text(PLUGIN)
    built = payload.build((PluginSpec("widths", {"every": "3"}),), (tmp_path,))
    (reported,) = built.plugins
    carried = {"version": "", "sha256": built.sources[0].sha256, "origin": str(file)}
    assert re.fullmatch("mine@[0-9a-f]{6}:Widths", reported.pop("entry"))
    assert reported == {"name": "widths", "options": {"every": "3"}, "by_name": True, **carried}
    assert built.sources[0].files == {path: PLUGIN.encode()}
    assert "mine" not in sys.modules


def test_an_installed_plugin_is_found_without_importing_it():
    source = sources.find("nan")
    assert source.entry.startswith("hookd_nan:")
    assert any(path.startswith("hookd_nan") for path in source.files)


def test_an_unknown_plugin_is_refused_with_the_names_that_there_are():
    with pytest.raises(PluginError) as caught:
        sources.find("nun")
    assert caught.value.reason == "unknown-plugin"
    assert "nan" in caught.value.hint
    assert f" in the entry points hookd.plugins of {sys.prefix}" in caught.value.hint


def test_an_unknown_plugin_is_refused_with_what_is_in_each_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directories = [Path(name) for name in ("mine", "other", "empty")]
    for directory in directories:
        directory.mkdir()
    (tmp_path / "mine/mine.py").write_text(PLUGIN)
    (tmp_path / "other/other.py").write_text("x = 1")
    with pytest.raises(PluginError) as caught:
        sources.find("width", directories)
    assert caught.value.hint.startswith("Did you mean 'widths'?")
    assert caught.value.hint.endswith(
        f"; widths in {tmp_path}/mine; none in {tmp_path}/other (no class in its 1 Python file derives from Plugin and "
        f"sets `name`); none in {tmp_path}/empty (it has neither *.py nor */__init__.py)."
    )


LONG_TEXT = 'text = """' + "x\n" * 40 + '"""'
PIECES = f"import functools\n{LONG_TEXT}\n@functools.cache\n@functools.wraps(print)\ndef f():\n    pass\n"


def test_a_source_is_cut_between_statements_only_and_means_the_same():
    cut = payload.in_pieces(PIECES.encode(), payload._pieces(PIECES.encode()))
    assert cut.count(b"\f") == 3
    assert b"\n\f\f\f@functools.cache\n" in cut
    assert ast.dump(ast.parse(cut), include_attributes=False) == ast.dump(ast.parse(PIECES))


@pytest.mark.parametrize("source", [b"class :", b"# coding: latin-1\nx = '\xe4'\n", b"x = 1\0"])
def test_a_source_that_cannot_be_read_here_travels_as_it_is(source):
    assert stub.unpack(payload._pack({"odd.py": source})) == {"odd.py": source}


@pytest.mark.parametrize("is_same_python", [True, False])
def test_what_was_compiled_here_and_what_the_target_compiles_are_where_the_source_is(is_same_python):
    files = stub.unpack(payload.build(()).archive)
    path = "hookd/wire/page/writer.py"
    assert files[path + "c"].startswith(importlib.util.MAGIC_NUMBER)
    if not is_same_python:
        files[path + "c"] = b"old\r" + files[path + "c"][4:]
    ours = compile((REPOSITORY / path).read_bytes(), "/hookd-payload/" + path, "exec", dont_inherit=True)
    assert _functions(stub.codes(files, path)) == _functions([ours])


def _functions(codes):
    """Return name and lines of every code object inside, apart from the modules themselves."""
    found, waiting = [], list(codes)
    while waiting:
        inner = [one for one in waiting.pop().co_consts if hasattr(one, "co_code")]
        found += [(one.co_name, one.co_firstlineno, {line for *_, line in one.co_lines()}) for one in inner]
        waiting += inner
    return sorted(found, key=str)


def test_a_plugin_that_is_no_python_is_refused(tmp_path):
    (tmp_path / "broken.py").write_text("class :")
    with pytest.raises(PluginError, match=r"broken\.py"):
        sources.find("widths", (tmp_path,))


def test_a_file_says_its_version_and_an_installed_plugin_has_its_distributions(tmp_path):
    (tmp_path / "mine.py").write_text('__version__ = "1.4"\n' + PLUGIN)
    assert sources.find("widths", (tmp_path,)).version == "1.4"
    installed = sources.find("nan")
    assert (installed.version, installed.origin) == (importlib.metadata.version("hookd"), "hookd")


def test_the_hash_of_a_source_is_that_of_all_its_files(tmp_path):
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text(PLUGIN)
    (package / "part.py").write_text("value = 1\n")
    hashes = [sources.find("widths", (tmp_path,)).sha256]
    assert sources.find("widths", (tmp_path,)).sha256 == hashes[0]
    (package / "part.py").write_text("value = 2\n")
    hashes.append(sources.find("widths", (tmp_path,)).sha256)
    (package / "part.py").rename(package / "other.py")
    hashes.append(sources.find("widths", (tmp_path,)).sha256)
    assert len(set(hashes)) == 3


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Install distributions of a few files each, as pip records them."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(name, files, requires=(), entry=""):
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            if text is not None:
                (tmp_path / path).write_text(text)
        info = tmp_path / f"{name.replace('-', '_')}-1.5.dist-info"
        info.mkdir()
        lines = [
            "Metadata-Version: 2.1",
            f"Name: {name}",
            "Version: 1.5",
            *(f"Requires-Dist: {one}" for one in requires),
        ]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        (info / "RECORD").write_text("".join(f"{path},,\n" for path in files))
        (info / "entry_points.txt").write_text(f"[hookd.plugins]\n{entry}\n" if entry else "")

    install(
        "hookd-widths", {"hookd_widths.py": PLUGIN}, entry="widths = hookd_widths:Widths",
        requires=["hookd>=0.1", "torch", "Small.Part>=1", "absent; extra == 'more'", "absent; python_version < '3'"],
    )  # fmt: skip
    return install


def test_what_a_plugin_requires_is_carried_with_what_that_requires(installed):
    installed("small_part", {"small/__init__.py": "one = 1\n", "small/data.txt": "x"}, requires=["deeper"])
    installed("deeper", {"deeper.py": "two = 2\n", "../../../bin/deeper.py": None})
    source = sources.find("widths")
    assert set(source.files) == {"hookd_widths.py", "small/__init__.py", "deeper.py"}
    assert (source.version, source.origin) == ("1.5", "hookd-widths")


def test_what_only_the_half_in_the_daemon_requires_is_not_carried(installed):
    requires = ["small-part", "heavy>=2; extra == 'daemon'", "deeper; python_version >= '3' and extra == \"daemon\""]
    installed("small-part", {"small.py": ""}, requires=["absent; extra == 'daemon'"])
    installed("heavy", {"heavy.py": "", "heavy.cpython-311.so": ""})
    installed("deeper", {"deeper.py": ""})
    installed("hookd-two", {"hookd_two.py": PLUGIN}, requires=requires, entry="two = hookd_two:Widths")
    assert set(sources.find("two").files) == {"hookd_two.py", "small.py"}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"small.py": "", "small.cpython-311.so": ""}, "small.cpython-311.so is compiled code"),
        ({"small.py": "", "gone.py": None}, "gone.py is missing"),
        ({"small.pth": ""}, "no Python file"),
        (None, "requires small-part, which is not installed"),
    ],
)
def test_what_cannot_be_carried_is_refused_by_name(installed, files, said):
    if files is not None:
        installed("small-part", files)
    with pytest.raises(PluginError) as caught:
        sources.find("widths")
    assert said in caught.value.message
    assert "'widths'" in caught.value.message


def test_compiled_code_in_a_plugins_own_package_is_refused(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/__init__.py").write_text(PLUGIN)
    (tmp_path / "mine/fast.so").write_text("")
    with pytest.raises(PluginError, match=r"mine/fast\.so is compiled code"):
        sources.find("widths", (tmp_path,))
