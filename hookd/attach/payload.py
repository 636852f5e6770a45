"""What is carried into a target: the agent's half of hookd, a private pluggy, and the plugins asked for. Tool side.

Plugins are found as metadata and source, never imported: importing one would import torch.
"""

from __future__ import annotations
import __future__

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import io
import marshal
import threading
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hookd
from hookd.attach import requirements
from hookd.errors import PluginError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hookd.config import PluginSpec

GROUP = "hookd.plugins"
_TOOL_SIDE = {
    "__main__.py", "_pluggy.py", "attach", "cli", "config", "daemon", "daemonspecs.py", "examples", "native",
    "serving.py", "testing.py",
}  # fmt: skip
_EPOCH = (1980, 1, 1, 0, 0, 0)
SOURCE_ROOT = "/hookd-payload/"
"""Where `hookd/agent/loader.py` says that its modules are; `arrival.py` compiles them under it."""
_PARSING = threading.Lock()
"""Held while sources are parsed: two threads that make syntax trees at a time count their depth in one place, and one
of them gets a SystemError ("recursion depth mismatch", python/cpython#106905; met on 3.11.7)."""
_PIECE, _PIECE_LINES = b"\f\f\f", 30
"""What marks a piece for it, and from how many lines on one ends: about 1 ms of compiling."""


@dataclass(frozen=True)
class Source:
    """Where a plugin is: its entry `module:Class` and the sources of its top-level module, by path in a zip.

    Attributes:
        version: of the distribution that it is installed with, else its module's `__version__`, else "".
        origin: where it was found, in words: a distribution's name, or a path.
    """

    name: str
    entry: str
    files: dict[str, bytes]
    version: str = ""
    origin: str = ""

    @functools.cached_property
    def sha256(self) -> str:
        """What is carried, as one hash in hex: of the paths and the contents, each with its length."""
        digest = hashlib.sha256(self.entry.encode())
        for path, content in sorted(self.files.items()):
            digest.update(f"\n{len(path)} {path} {len(content)}\n".encode())
            digest.update(content)
        return digest.hexdigest()


@dataclass(frozen=True)
class Payload:
    """A zip for one target.

    Attributes:
        archive: the zip, uncompressed.
        sha256: of the archive, in hex.
        plugins: what the agent is to enable, in the form of its configuration.
        sources: where each of them is from.
    """

    archive: bytes
    sha256: str
    plugins: tuple[dict[str, Any], ...]
    sources: tuple[Source, ...]


def build(plugins: Iterable[PluginSpec], plugin_dirs: Sequence[Path] = ()) -> Payload:
    """Collect the sources for a target.

    Raises:
        PluginError: reason "unknown-plugin" or "plugin".
    """
    files = dict(_agent_files())
    enabled, sources = [], []
    for spec in plugins:
        source = find(spec.name, plugin_dirs)
        files.update(source.files)
        sources.append(source)
        enabled.append(describe(spec, source))
    archive = _pack(files)
    return Payload(archive, hashlib.sha256(archive).hexdigest(), tuple(enabled), tuple(sources))


def unpack(name: str, directory: Path) -> None:
    """Write the sources of an installed plugin and of what it imports of hookd into a directory, as files.

    For a process that has neither: what replays a bundle runs in the training's environment.

    Raises:
        PluginError: there is no such plugin.
    """
    for path, content in {**dict(_agent_files()), **find(name).files}.items():
        file = directory / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def describe(spec: PluginSpec, source: Source) -> dict[str, Any]:
    """Give a plugin in the form of the agent's configuration."""
    return {
        "name": spec.name,
        "entry": source.entry,
        "options": dict(spec.options),
        "by_name": spec.by_name,
        "version": source.version,
        "sha256": source.sha256,
        "origin": source.origin,
    }


def find(name: str, plugin_dirs: Sequence[Path] = ()) -> Source:
    """Find a plugin: in the directories given, then among those installed.

    Raises:
        PluginError: there is none of this name, or its source cannot be read.
    """
    for directory in plugin_dirs:
        for source in in_directory(directory):
            if isinstance(source, Source) and source.name == name:
                return source
    for entry in importlib.metadata.entry_points(group=GROUP):
        if entry.name == name:
            source = installed_source(entry)
            required = requirements.sources(name, entry.dist) if entry.dist is not None else {}
            return replace(source, files={**required, **source.files})
    raise PluginError(
        "; ".join([f"there is no plugin '{name}'", *(broken.message for broken in _broken(plugin_dirs))]),
        reason="unknown-plugin",
        hint=f"There are {', '.join(names(plugin_dirs))}.",
    )


def installed_source(entry: importlib.metadata.EntryPoint) -> Source:
    """Read the source of a plugin that is installed, without importing it.

    Raises:
        PluginError: it cannot be found.
    """
    files = _module_files(entry.name, entry.value.partition(":")[0].partition(".")[0])
    version, origin = (entry.dist.version, entry.dist.name) if entry.dist is not None else ("", "")
    return Source(entry.name, entry.value, files, version, origin)


def names(plugin_dirs: Sequence[Path] = ()) -> list[str]:
    """Name every plugin that `find` finds."""
    found = {entry.name for entry in importlib.metadata.entry_points(group=GROUP)}
    for directory in plugin_dirs:
        found.update(source.name for source in in_directory(directory) if isinstance(source, Source))
    return sorted(found)


def _broken(plugin_dirs: Sequence[Path]) -> list[PluginError]:
    return [one for directory in plugin_dirs for one in in_directory(directory) if isinstance(one, PluginError)]


def read(source: Source) -> tuple[str, bool, bool]:
    """Give the first line of the class' docstring, and whether it says that it changes training: always, or by option."""
    module, _, class_name = source.entry.partition(":")
    path = module.replace(".", "/")
    text = source.files.get(f"{path}/__init__.py") or source.files.get(f"{path}.py") or b""
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            summary = (ast.get_docstring(node) or "").split("\n", 1)[0]
            said = dict(filter(None, map(_assigned, node.body)))
            mutates = said.get("mutates")
            is_always = isinstance(mutates, ast.Constant) and mutates.value is True
            return summary, is_always, is_always or "mutating" in said
    return "", False, False


def _assigned(node: ast.stmt) -> tuple[str, ast.expr | None] | None:
    """Give the name that a statement assigns to, and the value."""
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id, node.value
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id, node.value
    return None


def apart(
    specs: Iterable[PluginSpec], plugin_dirs: Sequence[Path] = ()
) -> tuple[tuple[PluginSpec, ...], tuple[PluginSpec, ...]]:
    """Tell the plugins that only look from those that may change the training, with the options that they are given."""
    only_look: list[PluginSpec] = []
    may_change: list[PluginSpec] = []
    for spec in specs:
        _, always, by_option = read(find(spec.name, plugin_dirs))
        (may_change if always or (by_option and spec.options) else only_look).append(spec)
    return tuple(only_look), tuple(may_change)


def arrival() -> tuple[bytes, bytes]:
    """Give `hookd/agent/arrival.py`, which is executed in the target before there is a payload.

    Returns:
        Its source, and its code for targets of our own version of Python, with the magic number in front.
    """
    source = (Path(hookd.__file__).parent / "agent" / "arrival.py").read_bytes()
    code = compile(source, "hookd/agent/arrival.py", "exec", dont_inherit=True)
    return source, importlib.util.MAGIC_NUMBER + marshal.dumps(code)


def _agent_files() -> Iterator[tuple[str, bytes]]:
    root = Path(hookd.__file__).parent
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if inside.parts[0] not in _TOOL_SIDE:
            yield f"hookd/{inside.as_posix()}", path.read_bytes()
    kernel = root / "native" / "kernel.so"
    if kernel.exists():  # made at install, where there was a compiler
        yield "hookd/native/kernel.so", kernel.read_bytes()
    spec = importlib.util.find_spec("pluggy")
    assert spec is not None
    assert spec.origin is not None
    for path in sorted(Path(spec.origin).parent.glob("*.py")):
        yield f"hookd/_pluggy/{path.name}", path.read_bytes()


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


def package(root: Path) -> dict[str, bytes]:
    """Read the sources of a package, by path beside it.

    Raises:
        PluginError: compiled code is among them.
    """
    for path in root.rglob("*"):
        if path.suffix in requirements.COMPILED:
            raise PluginError(f"{path} is compiled code, and cannot be carried into a target", hint="Only Python can.")
    return {path.relative_to(root.parent).as_posix(): path.read_bytes() for path in sorted(root.rglob("*.py"))}


def in_directory(directory: Path) -> Iterator[Source | PluginError]:
    """Find the plugins of a directory: modules and packages with a class that sets `name` and derives from Plugin.

    For a file that is no Python the error comes in its place: it must not hide the others.
    """
    if not directory.is_dir():
        raise PluginError(f"there is no plugin directory {directory}")
    for path in sorted([*directory.glob("*.py"), *directory.glob("*/__init__.py")]):
        module = path.parent.name if path.name == "__init__.py" else path.stem
        try:
            classes = list(plugin_classes(path))
        except PluginError as broken:
            yield broken
            continue
        for class_name, plugin in classes:
            files = package(path.parent) if path.name == "__init__.py" else {path.name: path.read_bytes()}
            yield Source(plugin, f"{module}:{class_name}", files, version_of(path), str(path))


def plugin_classes(path: Path, base: str = "Plugin") -> Iterator[tuple[str, str]]:
    """Give class and plugin name for each plugin that a file defines, by reading it.

    Raises:
        PluginError: it is no Python.
    """
    derived = {base}  # and what derives from it in this file, in whatever number of steps
    for node in _tree(path).body:
        if isinstance(node, ast.ClassDef) and any(_last_name(base) in derived for base in node.bases):
            derived.add(node.name)
            for statement in node.body:
                if (plugin := _assigned_name(statement)) is not None:
                    yield node.name, plugin


def _tree(path: Path) -> ast.Module:
    try:
        with _PARSING:
            return ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as exc:
        where, why = f"{path}:{getattr(exc, 'lineno', None) or 1}", getattr(exc, "msg", None) or exc
        raise PluginError(f"{where}: not valid Python: {why}") from exc


def version_of(path: Path) -> str:
    """Give what a module says of its version: `__version__ = "1.2"`."""
    values = (_assigned_name(statement, "__version__") for statement in _tree(path).body)
    return next((value for value in values if value is not None), "")


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _assigned_name(node: ast.stmt, name: str = "name") -> str | None:
    """Give "x" for the statement `name = "x"`, with or without an annotation."""
    if isinstance(node, ast.Assign):
        targets, value = node.targets, node.value
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        targets, value = [node.target], node.value
    else:
        return None
    is_name = any(isinstance(target, ast.Name) and target.id == name for target in targets)
    is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)
    return str(value.value) if is_name and is_text and isinstance(value, ast.Constant) else None


def _pack(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive, _PARSING:
        for path in sorted(files):
            source, compiled = _prepared(files[path], path) if path.endswith(".py") else (files[path], b"")
            archive.writestr(zipfile.ZipInfo(path, _EPOCH), source)
            if compiled:
                archive.writestr(zipfile.ZipInfo(path + "c", _EPOCH), compiled)
    return buffer.getvalue()


@functools.lru_cache(maxsize=512)
def _prepared(source: bytes, path: str) -> tuple[bytes, bytes]:
    """Give a source with the marks where it may be cut, and its pieces compiled, b"" where it has none."""
    pieces = _pieces(source)
    return in_pieces(source, pieces), _compiled(pieces, path) if pieces else b""


def _pieces(source: bytes) -> list[list[ast.stmt]]:
    """Group the statements of a module so that the target need not compile or run it in one go.

    What cannot be read here (a newer syntax, another encoding) has no pieces and travels as it is.
    """
    pieces: list[list[ast.stmt]] = []
    try:
        for statement in ast.parse(source.decode()).body:
            if not pieces or _first_line(statement) - _first_line(pieces[-1][0]) >= _PIECE_LINES:
                pieces.append([])
            pieces[-1].append(statement)
    except (SyntaxError, ValueError):
        return []
    return pieces


def _first_line(statement: ast.stmt) -> int:
    return min([statement.lineno, *(int(one.lineno) for one in getattr(statement, "decorator_list", ()))])


def in_pieces(source: bytes, pieces: list[list[ast.stmt]]) -> bytes:
    """Mark where a source may be cut. Form feeds at the start of a line are white space to Python."""
    lines = source.split(b"\n")
    for piece in pieces[1:]:
        first = _first_line(piece[0]) - 1
        lines[first] = _PIECE + lines[first]
    return b"\n".join(lines)


def _compiled(pieces: list[list[ast.stmt]], path: str) -> bytes:
    """Compile the pieces of a source, for targets of our own version of Python: most of what an import costs."""
    codes, flags = [], 0
    for piece in pieces:
        codes.append(compile(ast.Module(piece, []), SOURCE_ROOT + path, "exec", flags, dont_inherit=True))
        flags |= codes[-1].co_flags & __future__.annotations.compiler_flag
    return importlib.util.MAGIC_NUMBER + marshal.dumps(codes)
