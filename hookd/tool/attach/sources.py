"""Find plugins and their sources: in directories, and installed next to hookd.

Plugins are found by metadata and source text, never imported: importing one would import torch.
"""

from __future__ import annotations

import ast
import difflib
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hookd.errors import PluginError
from hookd.tool.attach import requirements
from hookd.tool.attach.trusted import ANYBODY, Trust
from hookd.tool.reports.wording import count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

GROUP = "hookd.plugins"
TAG_SEPARATOR = "@"
"""The same as in `hookd/target/boot/loader.py`."""
_TOP = re.compile(r"[^/.:]+")
PARSING = threading.Lock()
"""Held while sources are parsed: two threads that build syntax trees at the same time share a depth counter, and one of them gets
a SystemError ("recursion depth mismatch", python/cpython#106905; seen on 3.11.7)."""


@dataclass(frozen=True)
class Source:
    """A plugin: its entry `module:Class` and the sources of its top-level module, by path.

    Attributes:
        version: of its distribution, else its module's `__version__`, else "".
        origin: where it was found: the name of a distribution, or a path.
        tag: suffix that distinguishes its module in a target from one of the same name in another directory; "" if installed.
    """

    name: str
    entry: str
    files: dict[str, bytes]
    version: str = ""
    origin: str = ""
    tag: str = ""

    @property
    def carried(self) -> dict[str, bytes]:
        """The sources, by path in the target."""
        return {self._in_room(path): content for path, content in self.files.items()}

    @property
    def carried_entry(self) -> str:
        """The entry in the target."""
        return self._in_room(self.entry)

    def _in_room(self, text: str) -> str:
        """Append the tag to the top-level module: `a.py`, `a/b.py` and `a:B` become `a@1f2e3d.py` and so on."""
        top = _TOP.match(text)
        return f"{top[0]}{TAG_SEPARATOR}{self.tag}{text[top.end() :]}" if self.tag and top else text

    @functools.cached_property
    def sha256(self) -> str:
        """The hash of the entry and the files in hex; paths and contents are hashed with their lengths."""
        digest = hashlib.sha256(self.entry.encode())
        for path, content in sorted(self.files.items()):
            digest.update(f"\n{len(path)} {path} {len(content)}\n".encode())
            digest.update(content)
        return digest.hexdigest()


def find(name: str, plugin_dirs: Sequence[Path] = (), trust: Trust = ANYBODY) -> Source:
    """Find a plugin: in the given directories, then among the installed plugins.

    Raises:
        PluginError: no plugin has this name, or its source cannot be read or is not trusted.
    """
    for directory in plugin_dirs:
        for source in in_directory(directory, trust):
            if isinstance(source, Source) and source.name == name:
                return source
    for entry in importlib.metadata.entry_points(group=GROUP):
        if entry.name == name:
            source = installed_source(entry)
            required = requirements.sources(name, entry.dist) if entry.dist is not None else {}
            return replace(source, files={**required, **source.files})
    near = "".join(f"Did you mean '{one}'? " for one in difflib.get_close_matches(name, names(plugin_dirs), 1))
    raise PluginError(
        "; ".join([f"there is no plugin '{name}'", *(broken.message for broken in _broken(plugin_dirs, trust))]),
        reason="unknown-plugin",
        hint=f"{near}There are {'; '.join(_places(plugin_dirs))}.",
    )


def _places(plugin_dirs: Sequence[Path]) -> Iterator[str]:
    """Yield the plugins in each place where `find` looks, with its full path."""
    installed = ", ".join(names()) or "none"
    yield f"{installed} in the entry points {GROUP} of {sys.prefix}"
    for directory in plugin_dirs:
        found = sorted({source.name for source in in_directory(directory) if isinstance(source, Source)})
        yield f"{', '.join(found)} in {directory.absolute()}" if found else f"none in {nothing_in(directory)}"


def nothing_in(directory: Path) -> str:
    """Describe a directory without plugins: its full path, and what is missing there."""
    files = len(_modules(directory))
    why = f"no class in its {count(files, 'Python file')} derives from Plugin and sets `name`"
    return f"{directory.absolute()} ({why if files else 'it has neither *.py nor */__init__.py'})"


def installed_source(entry: importlib.metadata.EntryPoint) -> Source:
    """Read the source of an installed plugin without importing it.

    Raises:
        PluginError: the source cannot be found.
    """
    files = _module_files(entry.name, entry.value.partition(":")[0].partition(".")[0])
    version, origin = (entry.dist.version, entry.dist.name) if entry.dist is not None else ("", "")
    return Source(entry.name, entry.value, files, version, origin)


def names(plugin_dirs: Sequence[Path] = ()) -> list[str]:
    """Return the names of all plugins that `find` finds, sorted."""
    known = {entry.name for entry in importlib.metadata.entry_points(group=GROUP)}
    for directory in plugin_dirs:
        known.update(source.name for source in in_directory(directory) if isinstance(source, Source))
    return sorted(known)


def _broken(plugin_dirs: Sequence[Path], trust: Trust) -> list[PluginError]:
    items = (item for directory in plugin_dirs for item in in_directory(directory, trust))
    return [item for item in items if isinstance(item, PluginError)]


def read(source: Source) -> tuple[str, bool, bool]:
    """Return the class's summary line, whether it always changes the training, and whether it may by an option."""
    module, _, class_name = source.entry.partition(":")
    path = module.replace(".", "/")
    text = source.files.get(f"{path}/__init__.py") or source.files.get(f"{path}.py") or b""
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            summary = (ast.get_docstring(node) or "").split("\n", 1)[0]
            attributes = dict(filter(None, map(_assigned, node.body)))
            mutates = attributes.get("mutates")
            is_always = isinstance(mutates, ast.Constant) and mutates.value is True
            return summary, is_always, is_always or "mutating" in attributes
    return "", False, False


def _assigned(node: ast.stmt) -> tuple[str, ast.expr | None] | None:
    """Return the name that a statement assigns to, and the value."""
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id, node.value
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id, node.value
    return None


def _module_files(plugin: str, module: str) -> dict[str, bytes]:
    """Read the sources of an installed top-level module without importing it."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise PluginError(f"the source of plugin '{plugin}' (module {module}) cannot be found")
    origin = Path(spec.origin)
    return package(origin.parent) if spec.submodule_search_locations else {origin.name: origin.read_bytes()}


def in_directory(directory: Path, trust: Trust = ANYBODY, base: str = "Plugin") -> Iterator[Source | PluginError]:
    """Yield the plugins in a directory.

    They are modules and packages with a class that sets `name` and derives from `base`. For a file that is invalid or not
    trusted, the error is yielded instead, so that the other plugins are still found.

    Raises:
        PluginError: the directory does not exist, or is not trusted.
    """
    if not directory.is_dir():
        raise PluginError(f"there is no plugin directory {directory}")
    trust = trust.directory(directory)
    tag = hashlib.sha256(os.fsencode(os.path.abspath(directory))).hexdigest()[:6]  # noqa: PTH100  no symlinks resolved
    for path in _modules(directory):
        module = path.parent.name if path.name == "__init__.py" else path.stem
        try:
            text = trust.read(path)
            tree = _tree(path, text)
            classes, version = list(_plugin_classes(tree, base)), _version(tree)
            is_package = classes and path.name == "__init__.py"
            files = package(path.parent, trust) if is_package else {path.name: text}
        except PluginError as broken:
            yield broken
            continue
        for class_name, plugin in classes:
            yield Source(plugin, f"{module}:{class_name}", files, version, str(path), tag)


def _modules(directory: Path) -> list[Path]:
    return sorted([*directory.glob("*.py"), *directory.glob("*/__init__.py")])


def package(root: Path, trust: Trust = ANYBODY) -> dict[str, bytes]:
    """Return the sources of a package, by path relative to the package's parent.

    Raises:
        PluginError: a file is compiled code, or is not trusted.
    """
    files = {}
    for path in sorted(root.rglob("*")):
        if path.suffix in requirements.COMPILED:
            raise PluginError(f"{path} is compiled code, and cannot be carried into a target", hint="Only Python can.")
        if path.suffix == ".py":
            trust.directory(path.parent)
            files[path.relative_to(root.parent).as_posix()] = trust.read(path)
    return files


def _tree(path: Path, text: bytes) -> ast.Module:
    try:
        with PARSING:
            return ast.parse(text, str(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as exc:  # the last two: it is nested too deep
        where, why = f"{path}:{getattr(exc, 'lineno', None) or 1}", getattr(exc, "msg", None) or exc
        raise PluginError(f"{where}: not valid Python: {why}") from exc


def _plugin_classes(tree: ast.Module, base: str) -> Iterator[tuple[str, str]]:
    """Yield class name and plugin name of each plugin that a module's source defines."""
    derived = {base}  # and the classes in this file that derive from it, directly or indirectly
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any(last_name(base) in derived for base in node.bases):
            derived.add(node.name)
            for statement in node.body:
                if (plugin := _assigned_name(statement)) is not None:
                    yield node.name, plugin


def _version(tree: ast.Module) -> str:
    """Return the version that a module's source assigns, as in `__version__ = "1.2"`, else ""."""
    values = (_assigned_name(statement, "__version__") for statement in tree.body)
    return next((value for value in values if value is not None), "")


def last_name(node: ast.expr) -> str:
    """Return `b` for `a.b` and for `b`, "" for another expression."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _assigned_name(node: ast.stmt, name: str = "name") -> str | None:
    """Return "x" for the statement `name = "x"`, with or without an annotation, else None."""
    if isinstance(node, ast.Assign):
        targets, value = node.targets, node.value
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        targets, value = [node.target], node.value
    else:
        return None
    is_name = any(isinstance(target, ast.Name) and target.id == name for target in targets)
    is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)
    return str(value.value) if is_name and is_text and isinstance(value, ast.Constant) else None
