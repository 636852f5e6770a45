"""Effects of imports: the tool side loads no torch, the target side needs no site-packages, help is quick."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hookd
from hookd.tool.attach import payload

PACKAGE = Path(hookd.__file__).parent
HEAVY = ("torch", "aiohttp", "prometheus_client", "psutil", "rich", "textual", "yaml", "sqlite3")
INJECTED = """api.context api.events api.hookspecs api.metrics api.nested api.plugin errors version wire.descriptors wire.originals
wire.page""".split()
REPLACED = """_thread asyncio builtins datetime fcntl io os pathlib posixpath queue select selectors shutil signal socket subprocess
tempfile threading time""".split()
"""Modules that gevent, eventlet, freezegun, time-machine, pyfakefs and the like replace, as a whole or in parts."""
MAY_IMPORT = {
    "hookd/target/boot/queued.py": {"_thread"},  # loaded before `originals`
    "hookd/target/boot/stub.py": {"threading"},  # to forget the thread that it runs in
    "hookd/target/remote/evaluate.py": {"builtins"},  # the names that an expression may use
    "hookd/target/plugins/global_state.py": {"threading"},  # changes that the training may make there are undone
    "hookd/target/boot/loader.py": {
        "builtins",
        "time",
    },  # loaded before `originals`; `thread_time`, which is not a clock to freeze
    "hookd/target/boot/spawn.py": {"threading"},  # its list of threads
    "hookd/target/remote/stacks.py": {"threading"},  # names of threads
    "hookd/target/entry/threads.py": {"threading"},  # which there are
    "hookd/wire/originals.py": {"_thread", "time"},
    "hookd/wire/page/reader.py": {"threading", "time"},  # the daemon's side
}


def loaded_by(code: str, *flags: str, env: dict[str, str] | None = None) -> set[str]:
    """Run code in a fresh interpreter; return the top-level names of the modules that it had loaded at the end."""
    report = f"{code}\nimport sys\nprint(' '.join({{name.partition('.')[0] for name in sys.modules}}))"
    words = [sys.executable, *flags, "-c", report]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "module", ["hookd", "hookd.tool.cli", "hookd.tool.attach", "hookd.tool.daemon.service", "hookd.tool.config"]
)
def test_the_tool_side_does_not_load_torch(module):
    assert "torch" not in loaded_by(f"import {module}")


def test_importing_hookd_loads_nothing_of_the_daemon():
    assert not loaded_by("import hookd") & set(HEAVY)


@pytest.mark.parametrize("words", [["--help"], ["attach", "--help"], ["run", "--help"], ["nonsense"]])
def test_the_help_pages_load_nothing_heavy(words):
    code = f"import contextlib, io, hookd.tool.cli\nwith contextlib.redirect_stdout(io.StringIO()): hookd.tool.cli.main({words!r})"
    assert not loaded_by(code) & set(HEAVY)


@pytest.mark.parametrize("module", INJECTED)
def test_what_is_injected_imports_without_site_packages(module, tmp_path):
    # As in a payload: nothing else can be found (-I: no environment, -S: no site).
    payload._write(dict(payload._agent_files()), tmp_path)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport hookd.{module}"
    loaded = loaded_by(code, "-I", "-S", env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"})
    assert "hookd" in loaded
    assert not loaded & {"pluggy", "site", "torch", *HEAVY}


@pytest.mark.parametrize("module", ["hookd", "hookd.tool.cli", "hookd.tool.daemon.service", "hookd.wire.page"])
def test_importing_starts_no_thread_and_reads_no_environment(module):
    code = f"""
import os, threading
class Environment(dict):
    def __getitem__(self, key):
        if key.startswith("HOOKD"): raise AssertionError("read " + key)
        return dict.__getitem__(self, key)
    def get(self, key, default=None):
        if key.startswith("HOOKD"): raise AssertionError("read " + key)
        return dict.get(self, key, default)
os.environ = Environment(os.environ)
import {module}
assert threading.active_count() == 1, threading.enumerate()
"""
    assert "hookd" in loaded_by(code)


class AtRuntime(ast.NodeTransformer):
    """Leaves out what only a type checker sees."""

    def visit_If(self, node):  # noqa: N802 - the name is ast's
        is_for_types = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        return node.orelse or None if is_for_types else self.generic_visit(node)


def modules_used(source: bytes) -> set[str]:
    """Return the top-level modules that code imports, except `from os import environ`; and `open` if the code calls it."""
    used: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            used |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            is_environ = (node.module, [name.name for name in node.names]) == ("os", ["environ"])
            used |= set() if is_environ else {(node.module or "").partition(".")[0]}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open":
            used.add("open")
    return used


def carried() -> dict[str, bytes]:
    """Return the sources that run in a target, by path."""
    files = payload._agent_files()
    return {path: source for path, source in files if path.endswith(".py") and "_pluggy" not in path}


def test_what_runs_in_a_target_uses_nothing_that_others_replace():
    used = {path: modules_used(source) & {*REPLACED, "open"} for path, source in carried().items()}
    assert {path: found for path, found in used.items() if found} == MAY_IMPORT, (
        "take it from hookd.wire.originals or posix"
    )


def test_one_module_closes_descriptors_in_a_target():
    closing = {path for path, source in carried().items() if b"posix.close(" in source or b"posix.dup2(" in source}
    assert closing == {
        "hookd/target/boot/queued.py",  # the mailbox's, likewise
        "hookd/target/boot/stub.py",  # the mailbox's, before there is a payload: it looks, too
        "hookd/wire/descriptors.py",
        "hookd/wire/page/reader.py",  # the daemon's side
    }


LIBRARIES = {
    "hookd/wire": set(),
    "hookd/api": {"torch"},
    "hookd/target": {"torch"},
    "hookd/serving": set(),
    "plugins": {"torch"},
}
"""What a file may import besides the standard library and hookd: the table in docs/architecture.md."""
OPTIONAL = {"hookd/target/tensors/device_kernel.py": {"triton"}}
"""What a file may import that hookd does without if it is missing."""


@pytest.mark.parametrize("folder", LIBRARIES)
def test_what_a_training_must_be_able_to_import_needs_few_libraries(folder):
    root = PACKAGE.parent / folder
    own = {path.name for path in root.iterdir()} if folder == "plugins" else set()
    allowed = {*sys.stdlib_module_names, *own, *LIBRARIES[folder], "hookd", "open"}
    used = {}
    for path in root.rglob("*.py"):
        tree = AtRuntime().visit(ast.parse(path.read_bytes()))
        more = OPTIONAL.get(str(path.relative_to(PACKAGE.parent)), set())
        used[str(path)] = modules_used(ast.unparse(tree).encode()) - allowed - more
    assert used
    assert {path: names for path, names in used.items() if names} == {}
