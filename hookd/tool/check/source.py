"""Find plugin classes in files, folders and installed packages, without importing them."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hookd.errors import PluginError
from hookd.tool.attach.sources import last_name
from hookd.tool.check.imports import NotPython, parsed, reached

if TYPE_CHECKING:
    from collections.abc import Iterator

    Side = Literal["target", "daemon"]

GROUPS = ("hookd.plugins", "hookd.daemon_plugins")
BASES: dict[str, Side] = {"Plugin": "target", "DaemonPlugin": "daemon"}
"""The base classes of plugins, and the part of a plugin that each stands for."""
_OTHERS = ("setup.py", "conftest.py")
"""Files of a project that are not plugins."""


@dataclass(frozen=True)
class Subject:
    """A plugin to check.

    Attributes:
        name: of the plugin; "" if its class does not set one.
        module: absolute name of the module with the class.
        class_name: of the plugin.
        directory: that `module` can be imported from.
        file: with the class.
        files: all files of its package, except those that only the other part of the plugin imports; or its single file.
        side: where it runs.
    """

    name: str
    module: str
    class_name: str
    directory: Path
    file: Path
    files: tuple[Path, ...]
    side: Side = "target"

    @property
    def entry(self) -> str:
        """`module:Class`."""
        return f"{self.module}:{self.class_name}"

    @property
    def tree(self) -> ast.ClassDef:
        """The syntax tree of the class."""
        return self.parts[0][1]

    @functools.cached_property
    def parts(self) -> list[tuple[Path, ast.ClassDef]]:
        """The class and its bases in the same package, each with its file."""
        classes = {node.name: (file, node) for file in self.files for node in _classes(file)}
        classes[self.class_name] = self.file, next(node for node in _classes(self.file) if node.name == self.class_name)
        parts, pending = {}, [self.class_name]
        while pending:
            name = pending.pop(0)
            if name in classes and name not in parts:
                parts[name] = classes[name]
                pending += [last_name(base) for base in classes[name][1].bases]
        return list(parts.values())

    @functools.cached_property
    def imported(self) -> tuple[Path, ...]:
        """The files of the package that an import of the class loads."""
        return reached(self.file, self.directory, self.files)


def subjects(path: str, unread: list[NotPython] | None = None) -> list[Subject]:
    """Return the plugins in a file or folder, or of an installed name.

    Args:
        path: of a file or a folder, or an installed name.
        unread: errors of invalid files are appended here, so that the other plugins of a folder are still found. If it is
            None, the first error is raised.

    Raises:
        PluginError: there is no plugin, or a file is not valid Python.
    """
    plugins = list(_of_path(Path(path), unread) if Path(path).exists() else _installed(path))
    if not plugins and not unread:
        hint = "A plugin is a class that derives from hookd.Plugin; `hookd plugin new NAME` writes one."
        raise PluginError(f"there is no plugin in {path}", reason="unknown-plugin", hint=hint)
    return plugins


def _of_path(path: Path, unread: list[NotPython] | None) -> Iterator[Subject]:
    for plugins in _inside(path.resolve()):
        try:
            yield from plugins
        except NotPython as error:
            if unread is None:
                raise
            unread.append(error)


def _inside(path: Path) -> Iterator[Iterator[Subject]]:
    """Yield an iterator of plugins for each file and package at a path."""
    if path.is_file() and path.name != "__init__.py":
        yield _of_file(path, path.stem, path.parent, (path,))
    elif path.is_file() or (path / "__init__.py").exists():
        yield _of_package(path.parent if path.is_file() else path)
    else:
        for folder in (path, path / "src"):
            yield from (_of_package(init.parent) for init in _packages(folder))
            yield from (
                _of_file(file, file.stem, folder, (file,))
                for file in sorted(folder.glob("*.py"))
                if file.name not in _OTHERS
            )


def _packages(folder: Path) -> Iterator[Path]:
    return (init for init in sorted(folder.glob("*/__init__.py")) if init.parent.name not in ("tests", "test"))


def _classes(file: Path) -> Iterator[ast.ClassDef]:
    return (node for node in parsed(file).body if isinstance(node, ast.ClassDef))


def _derived(files: tuple[Path, ...], base: str) -> set[str]:
    """Return the classes that derive from `base`, directly or not, and `base` itself."""
    derived, before = {base}, 0
    while before != len(derived):
        before = len(derived)
        for node in (node for file in files for node in _classes(file)):
            if any(last_name(parent) in derived for parent in node.bases):
                derived.add(node.name)
    return derived


def _of_package(package: Path) -> Iterator[Subject]:
    files = tuple(sorted(package.rglob("*.py")))
    plugins = list(_all_of_package(package, files))
    for each in plugins:
        theirs = {file for other in plugins if other.side != each.side for file in other.imported} - {*each.imported}
        yield replace(each, files=tuple(file for file in files if file not in theirs))


def _all_of_package(package: Path, files: tuple[Path, ...]) -> Iterator[Subject]:
    for file in files:
        inner = file.relative_to(package.parent).with_suffix("")
        parts = inner.parts[:-1] if inner.name == "__init__" else inner.parts
        yield from _of_file(file, ".".join(parts), package.parent, files)


def _of_file(file: Path, module: str, directory: Path, files: tuple[Path, ...]) -> Iterator[Subject]:
    bases = {last_name(base) for other in files for node in _classes(other) for base in node.bases}
    for base, side in BASES.items():
        derived = _derived(files, base)
        for node in _classes(file):
            if any(last_name(parent) in derived for parent in node.bases):
                name = next(filter(None, map(_name_of, node.body)), "")
                if name or (hooks(node) and node.name not in bases):  # a base class of other plugins needs no name
                    yield Subject(name, module, node.name, directory, file, files, side)


def _installed(name: str) -> Iterator[Subject]:
    entries = [entry for group in GROUPS for entry in importlib.metadata.entry_points(group=group)]
    matching = [entry for entry in entries if entry.name == name]
    if any(_home(entry) for entry in matching):
        return (plugin for entry in matching for plugin in subjects(_home(entry)) if plugin.entry == entry.value)
    known = ", ".join(sorted({entry.name for entry in entries}))
    raise PluginError(
        f"there is no file, folder or installed plugin {name!r}",
        reason="unknown-plugin",
        hint=f"Installed plugins: {known}.",
    )


def _home(entry: importlib.metadata.EntryPoint) -> str:
    """Return the package or file of an entry point, or ""."""
    spec = importlib.util.find_spec(entry.value.partition(":")[0].partition(".")[0])
    if spec is None or spec.origin is None:
        return ""
    return str(Path(spec.origin).parent if spec.submodule_search_locations else spec.origin)


def dotted(node: ast.expr) -> str:
    """Return an attribute access as text, such as `a.b.c`.

    A part that is not a name is left out: `f().item` is `.item`.
    """
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _name_of(node: ast.stmt) -> str:
    value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    is_name = any(isinstance(target, ast.Name) and target.id == "name" for target in targets)
    return value.value if is_name and isinstance(value, ast.Constant) and isinstance(value.value, str) else ""


def is_hook(node: ast.stmt) -> bool:
    """Whether a statement of a class is a method marked with `hookimpl`."""
    return isinstance(node, ast.FunctionDef) and any(
        last_name(decorator.func if isinstance(decorator, ast.Call) else decorator) == "hookimpl"
        for decorator in node.decorator_list
    )


def hooks(node: ast.ClassDef) -> list[ast.FunctionDef]:
    """Return the hook methods of a class."""
    return [child for child in node.body if isinstance(child, ast.FunctionDef) and is_hook(child)]


def assigned(node: ast.ClassDef, name: str) -> object:
    """Return the constant that a class assigns to a name, else None."""
    for child in node.body:
        targets = (
            child.targets
            if isinstance(child, ast.Assign)
            else [child.target]
            if isinstance(child, ast.AnnAssign)
            else []
        )
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            value = child.value  # type: ignore[attr-defined]
            return value.value if isinstance(value, ast.Constant) else None
    return None
