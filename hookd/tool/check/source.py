"""Find the plugins of a file, a folder or an installed name, and their classes. Nothing is imported."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hookd.errors import PluginError
from hookd.tool.check.imports import NotPython, parsed, reached

if TYPE_CHECKING:
    from collections.abc import Iterator

    Half = Literal["target", "daemon"]

GROUPS = ("hookd.plugins", "hookd.daemon_plugins")
BASES: dict[str, Half] = {"Plugin": "target", "DaemonPlugin": "daemon"}
"""The classes that plugins derive from, and which half of a plugin that makes."""
_OTHERS = ("setup.py", "conftest.py")
"""Files of a project that hold no plugin."""


@dataclass(frozen=True)
class Subject:
    """A plugin to look at.

    Attributes:
        name: as it calls itself, "" where it does not.
        module: that holds the class, as it is imported.
        class_name: of the plugin.
        directory: from which `module` can be imported.
        file: that holds the class.
        files: all files of its package, without what the other half alone imports; of a single file that one.
        half: where it runs.
    """

    name: str
    module: str
    class_name: str
    directory: Path
    file: Path
    files: tuple[Path, ...]
    half: Half = "target"

    @property
    def entry(self) -> str:
        """`module:Class`."""
        return f"{self.module}:{self.class_name}"

    @property
    def tree(self) -> ast.ClassDef:
        """The class."""
        return self.parts[0][1]

    @functools.cached_property
    def parts(self) -> list[tuple[Path, ast.ClassDef]]:
        """The class, and the classes of its own package that it derives from, each with its file."""
        classes = {node.name: (file, node) for file in self.files for node in _classes(file)}
        classes[self.class_name] = self.file, next(one for one in _classes(self.file) if one.name == self.class_name)
        found, open_ = {}, [self.class_name]
        while open_:
            name = open_.pop(0)
            if name in classes and name not in found:
                found[name] = classes[name]
                open_ += [last_name(base) for base in classes[name][1].bases]
        return list(found.values())

    @functools.cached_property
    def imported(self) -> tuple[Path, ...]:
        """Those of its files that are imported with the class."""
        return reached(self.file, self.directory, self.files)


def subjects(path: str, unread: list[NotPython] | None = None) -> list[Subject]:
    """Find the plugins of a file, of a package or project folder, or that an installed name stands for.

    Args:
        path: of a file or a folder, or an installed name.
        unread: takes what is no Python, so that the other plugins of a folder are found; without it that is raised.

    Raises:
        PluginError: there is none, or a file is no Python.
    """
    found = list(_of_path(Path(path), unread) if Path(path).exists() else _installed(path))
    if not found and not unread:
        hint = "A plugin is a class that derives from hookd.Plugin; `hookd plugin new NAME` writes one."
        raise PluginError(f"there is no plugin in {path}", reason="unknown-plugin", hint=hint)
    return found


def _of_path(path: Path, unread: list[NotPython] | None) -> Iterator[Subject]:
    for inside in _inside(path.resolve()):
        try:
            yield from inside
        except NotPython as error:
            if unread is None:
                raise
            unread.append(error)


def _inside(path: Path) -> Iterator[Iterator[Subject]]:
    """Give what finds the plugins of a file or a package, or of each one in a folder."""
    if path.is_file() and path.name != "__init__.py":
        yield _of_file(path, path.stem, path.parent, (path,))
    elif path.is_file() or (path / "__init__.py").exists():
        yield _of_package(path.parent if path.is_file() else path)
    else:
        for folder in (path, path / "src"):
            yield from (_of_package(one.parent) for one in _packages(folder))
            yield from (
                _of_file(one, one.stem, folder, (one,))
                for one in sorted(folder.glob("*.py"))
                if one.name not in _OTHERS
            )


def _packages(folder: Path) -> Iterator[Path]:
    return (one for one in sorted(folder.glob("*/__init__.py")) if one.parent.name not in ("tests", "test"))


def _classes(file: Path) -> Iterator[ast.ClassDef]:
    return (node for node in parsed(file).body if isinstance(node, ast.ClassDef))


def _derived(files: tuple[Path, ...], base: str) -> set[str]:
    """Name the classes of some files that derive from `base`, in whatever number of steps."""
    derived, before = {base}, 0
    while before != len(derived):
        before = len(derived)
        for node in (one for file in files for one in _classes(file)):
            if any(last_name(one) in derived for one in node.bases):
                derived.add(node.name)
    return derived


def _of_package(package: Path) -> Iterator[Subject]:
    files = tuple(sorted(package.rglob("*.py")))
    found = list(_all_of_package(package, files))
    for one in found:
        theirs = {file for other in found if other.half != one.half for file in other.imported} - {*one.imported}
        yield replace(one, files=tuple(file for file in files if file not in theirs))


def _all_of_package(package: Path, files: tuple[Path, ...]) -> Iterator[Subject]:
    for file in files:
        inner = file.relative_to(package.parent).with_suffix("")
        parts = inner.parts[:-1] if inner.name == "__init__" else inner.parts
        yield from _of_file(file, ".".join(parts), package.parent, files)


def _of_file(file: Path, module: str, directory: Path, files: tuple[Path, ...]) -> Iterator[Subject]:
    bases = {last_name(base) for one in files for node in _classes(one) for base in node.bases}
    for base, half in BASES.items():
        derived = _derived(files, base)
        for node in _classes(file):
            if any(last_name(one) in derived for one in node.bases):
                name = next(filter(None, map(_name_of, node.body)), "")
                if name or (hooks(node) and node.name not in bases):  # a base of others needs no name
                    yield Subject(name, module, node.name, directory, file, files, half)


def _installed(name: str) -> Iterator[Subject]:
    entries = [entry for group in GROUPS for entry in importlib.metadata.entry_points(group=group)]
    wanted = [entry for entry in entries if entry.name == name]
    if any(_home(entry) for entry in wanted):
        return (one for entry in wanted for one in subjects(_home(entry)) if one.entry == entry.value)
    known = ", ".join(sorted({entry.name for entry in entries}))
    raise PluginError(
        f"there is no file, folder or installed plugin {name!r}",
        reason="unknown-plugin",
        hint=f"Installed are {known}.",
    )


def _home(entry: importlib.metadata.EntryPoint) -> str:
    """Give the package or file of an entry point; "" where there is none."""
    spec = importlib.util.find_spec(entry.value.partition(":")[0].partition(".")[0])
    if spec is None or spec.origin is None:
        return ""
    return str(Path(spec.origin).parent if spec.submodule_search_locations else spec.origin)


def last_name(node: ast.expr) -> str:
    """Give `b` of `a.b`, and of `b`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def dotted(node: ast.expr) -> str:
    """Give `a.b.c` of an attribute as text; what is no plain name begins with nothing: `.item`."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _name_of(node: ast.stmt) -> str:
    value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    is_name = any(isinstance(one, ast.Name) and one.id == "name" for one in targets)
    return value.value if is_name and isinstance(value, ast.Constant) and isinstance(value.value, str) else ""


def is_hook(node: ast.stmt) -> bool:
    """Whether a statement of a class is a method marked with `hookimpl`."""
    return isinstance(node, ast.FunctionDef) and any(
        last_name(one.func if isinstance(one, ast.Call) else one) == "hookimpl" for one in node.decorator_list
    )


def hooks(node: ast.ClassDef) -> list[ast.FunctionDef]:
    """Give the hook methods of a class."""
    return [one for one in node.body if isinstance(one, ast.FunctionDef) and is_hook(one)]


def assigned(node: ast.ClassDef, name: str) -> object:
    """Give the constant that a class assigns to a name, else None."""
    for one in node.body:
        targets = one.targets if isinstance(one, ast.Assign) else [one.target] if isinstance(one, ast.AnnAssign) else []
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            value = one.value  # type: ignore[attr-defined]
            return value.value if isinstance(value, ast.Constant) else None
    return None
