"""Build the payload for a target: the agent's part of hookd, a private pluggy, and the requested plugins.

Plugins are read as metadata and source, never imported: importing one would import torch.
"""

from __future__ import annotations
import __future__

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import marshal
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import hookd
from hookd.tool.attach.sources import PARSING, Source, find, read
from hookd.tool.attach.trusted import ANYBODY, Trust

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from hookd.tool.config import PluginSpec
    from hookd.wire.agent import PluginConfig

_CARRIED = ("__init__.py", "errors.py", "version.py", "api/**/*.py", "target/**/*.py", "wire/**/*.py")
"""The files of `hookd/` that a target gets."""
_MARSHAL = 2
"""Version of marshal's format: every Python reads this one, and its output is deterministic."""
SOURCE_ROOT = "/hookd-payload/"
"""The directory of the modules in the target according to `hookd/target/boot/loader.py`; `stub.py` compiles them under it."""
_PIECE, _PIECE_LINES = b"\f\f\f", 30
"""The separator at which `stub.py` splits a source, and the minimum lines of a piece: about 1 ms of compiling."""


@dataclass(frozen=True)
class Payload:
    """The files and plugins for one target.

    Attributes:
        archive: contents by path, for `marshal.loads`. A zip file would import the dependencies of `zipfile` from the target's disk.
        sha256: of the archive, in hex.
        plugins: to enable, in the format of the agent's configuration.
        sources: of the plugins.
    """

    archive: bytes
    sha256: str
    plugins: tuple[PluginConfig, ...]
    sources: tuple[Source, ...]


def build(plugins: Iterable[PluginSpec], plugin_dirs: Sequence[Path] = (), trust: Trust = ANYBODY) -> Payload:
    """Build the payload for a target.

    Args:
        plugins: to enable there.
        plugin_dirs: directories to search in addition to the installed plugins.
        trust: whose files may be sent there, see `trusted.of_target`.

    Raises:
        PluginError: reason "unknown-plugin", "plugin-dir" or "plugin".
    """
    files = dict(_agent_files())
    enabled, sources = [], []
    for spec in plugins:
        source = find(spec.name, plugin_dirs, trust)
        files.update(source.carried)
        sources.append(source)
        enabled.append(describe(spec, source))
    archive = _pack(files)
    return Payload(archive, hashlib.sha256(archive).hexdigest(), tuple(enabled), tuple(sources))


def unpack(name: str, directory: Path) -> None:
    """Write the sources of an installed plugin, and of the agent's part of hookd, to files in a directory.

    A process that replays a bundle needs this: it runs in the training's environment, which has neither.

    Raises:
        PluginError: there is no such plugin.
    """
    _write({**dict(_agent_files()), **find(name).files}, directory)


def _write(files: Mapping[str, bytes], directory: Path) -> None:
    for path, content in files.items():
        file = directory / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def unpack_testing(directory: Path) -> None:
    """Write the agent's part of hookd and `hookd.testing` to files; a Python with torch needs nothing else."""
    root = Path(hookd.__file__).parent
    testing = ((f"hookd/{path.relative_to(root).as_posix()}", path.read_bytes()) for path in root.glob("testing/*.py"))
    _write({**dict(_agent_files()), **dict(testing)}, directory)


def describe(spec: PluginSpec, source: Source) -> PluginConfig:
    """Return a plugin in the format of the agent's configuration."""
    return {
        "name": spec.name,
        "entry": source.carried_entry,
        "options": dict(spec.options),
        "by_name": spec.by_name,
        "version": source.version,
        "sha256": source.sha256,
        "origin": source.origin,
    }


def apart(
    specs: Iterable[PluginSpec], plugin_dirs: Sequence[Path] = ()
) -> tuple[tuple[PluginSpec, ...], tuple[PluginSpec, ...]]:
    """Split plugins into those that only observe and those that may change the training with the given options."""
    only_look: list[PluginSpec] = []
    may_change: list[PluginSpec] = []
    for spec in specs:
        _, always, by_option = read(find(spec.name, plugin_dirs))
        (may_change if always or (by_option and spec.options) else only_look).append(spec)
    return tuple(only_look), tuple(may_change)


def stub() -> tuple[bytes, bytes]:
    """Return `hookd/target/boot/stub.py`, which is executed in the target before the payload arrives.

    Returns:
        Its source, and its code for targets with our version of Python, preceded by the magic number.
    """
    source = Path(hookd.__file__).with_name("target").joinpath("boot", "stub.py").read_bytes()
    code = compile(source, "hookd/target/boot/stub.py", "exec", dont_inherit=True)
    return source, importlib.util.MAGIC_NUMBER + marshal.dumps(code)


def _agent_files() -> Iterator[tuple[str, bytes]]:
    root = Path(hookd.__file__).parent
    for path in sorted(path for pattern in _CARRIED for path in root.glob(pattern)):
        yield f"hookd/{path.relative_to(root).as_posix()}", path.read_bytes()
    machine = os.uname().machine  # the same as the target's, which runs on the same kernel
    for path in sorted((root / "native").glob(f"*-{machine}.so")):  # built at installation, if there was a compiler
        yield f"hookd/native/{path.name}", path.read_bytes()
    spec = importlib.util.find_spec("pluggy")
    assert spec is not None
    assert spec.origin is not None
    for path in sorted(Path(spec.origin).parent.glob("*.py")):
        yield f"hookd/_pluggy/{path.name}", path.read_bytes()


def _pack(files: dict[str, bytes]) -> bytes:
    packed: dict[str, bytes] = {}
    with PARSING:
        for path in sorted(files):
            packed[path], compiled = _prepared(files[path], path) if path.endswith(".py") else (files[path], b"")
            if compiled:
                packed[path + "c"] = compiled
    return marshal.dumps(packed, _MARSHAL)


@functools.lru_cache(maxsize=512)
def _prepared(source: bytes, path: str) -> tuple[bytes, bytes]:
    """Return a source with separators between its pieces, and its compiled pieces, b"" if it has none."""
    pieces = _pieces(source)
    return in_pieces(source, pieces), _compiled(pieces, path) if pieces else b""


def _pieces(source: bytes) -> list[list[ast.stmt]]:
    """Group the statements of a module into pieces, which the target compiles and runs one at a time.

    A source that cannot be parsed here (a newer syntax, another encoding) has no pieces and is sent unchanged.
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
    decorators = getattr(statement, "decorator_list", ())
    return min([statement.lineno, *(int(decorator.lineno) for decorator in decorators)])


def in_pieces(source: bytes, pieces: list[list[ast.stmt]]) -> bytes:
    """Return a source with separators between its pieces."""
    # The separator consists of form feeds, which are white space to Python at the start of a line.
    lines = source.split(b"\n")
    for piece in pieces[1:]:
        first = _first_line(piece[0]) - 1
        lines[first] = _PIECE + lines[first]
    return b"\n".join(lines)


def _compiled(pieces: list[list[ast.stmt]], path: str) -> bytes:
    """Compile the pieces of a source for targets with our version of Python, to make the import there cheaper."""
    codes, flags = [], 0
    for piece in pieces:
        codes.append(compile(ast.Module(piece, []), SOURCE_ROOT + path, "exec", flags, dont_inherit=True))
        flags |= codes[-1].co_flags & __future__.annotations.compiler_flag
    return importlib.util.MAGIC_NUMBER + marshal.dumps(codes)
