"""Find imports in source files, and the files that an import loads."""

from __future__ import annotations

import ast
import functools
from typing import TYPE_CHECKING, NamedTuple

from hookd.errors import PluginError
from hookd.tool.attach.trusted import ANYBODY

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class NotPython(PluginError):  # noqa: N818
    """A file is not valid Python.

    Attributes:
        file: that cannot be parsed.
        line: of the error, from 1.
        why: the parser's message.
    """

    def __init__(self, file: Path, line: int, why: str) -> None:
        super().__init__(f"{file}:{line}: not valid Python: {why}")
        self.file, self.line, self.why = file, line, why


class Import(NamedTuple):
    """An import of one name.

    Attributes:
        name: absolute name of the module.
        line: of the statement.
        given: name imported from the module; "" if the module itself is imported.
        is_for_types: whether it is below `if TYPE_CHECKING:`, and so never executed.
    """

    name: str
    line: int
    given: str
    is_for_types: bool


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file.

    Raises:
        NotPython: it cannot be parsed.
    """
    try:
        return ast.parse(ANYBODY.read(path), str(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as exc:  # the last two if it is nested too deeply
        raise NotPython(path, getattr(exc, "lineno", None) or 1, getattr(exc, "msg", None) or str(exc)) from exc
    except PluginError as exc:
        raise NotPython(path, 1, exc.message) from exc


def imports(path: Path, directory: Path) -> Iterator[Import]:
    """Yield the imports of a file, including those in functions.

    Args:
        path: of the file.
        directory: that its package is imported from; relative imports are resolved against it.
    """
    tree = parsed(path)
    typed = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and _is_for_types(node.test)
        for statement in node.body
        for child in ast.walk(statement)
    }
    package = path.relative_to(directory).parts[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, "", id(node) in typed) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            name = ".".join(filter(None, (*above, node.module)))
            yield from (Import(name, node.lineno, alias.name, id(node) in typed) for alias in node.names)


def _is_for_types(test: ast.expr) -> bool:
    """Whether a condition is `TYPE_CHECKING` itself, by itself or as an attribute of a module."""
    return "TYPE_CHECKING" in (getattr(test, "id", None), getattr(test, "attr", None))


def reached(file: Path, directory: Path, files: tuple[Path, ...]) -> tuple[Path, ...]:
    """Return those of `files` that an import of `file` loads.

    These are the file, the packages above it, and all that these import.
    """
    homes = {_module(home, directory): home for home in files}
    loaded: dict[Path, None] = {}
    pending = [_module(file, directory)]
    while pending:
        parts = pending.pop().split(".")
        for above in (".".join(parts[:count]) for count in range(1, len(parts) + 1)):
            home = homes.get(above)
            if home is not None and home not in loaded:
                loaded[home] = None
                pending += [
                    f"{each.name}.{each.given}".strip(".") for each in imports(home, directory) if not each.is_for_types
                ]
    return tuple(path for path in files if path in loaded)


def _module(file: Path, directory: Path) -> str:
    parts = file.relative_to(directory).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
