"""What files import, by their text, and which of a package's files come with one of them."""

from __future__ import annotations

import ast
import functools
from typing import TYPE_CHECKING, NamedTuple

from hookd.errors import PluginError
from hookd.tool.attach.trusted import ANYBODY

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class NotPython(PluginError):  # noqa: N818 - says what is so
    """A file is no Python.

    Attributes:
        file: that cannot be parsed.
        line: from 1.
        why: in the words of the parser.
    """

    def __init__(self, file: Path, line: int, why: str) -> None:
        super().__init__(f"{file}:{line}: not valid Python: {why}")
        self.file, self.line, self.why = file, line, why


class Import(NamedTuple):
    """One import.

    Attributes:
        name: of the module, from its top-level package on.
        line: of the statement.
        given: what is taken out of it; "" where it is imported as a whole.
        is_for_types: it is in an `if TYPE_CHECKING:`, and never done.
    """

    name: str
    line: int
    given: str
    is_for_types: bool


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Parse a file.

    Raises:
        NotPython: it is none.
    """
    try:
        return ast.parse(ANYBODY.read(path), str(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as exc:  # the last two: it is nested too deep
        raise NotPython(path, getattr(exc, "lineno", None) or 1, getattr(exc, "msg", None) or str(exc)) from exc
    except PluginError as exc:
        raise NotPython(path, 1, exc.message) from exc


def imports(path: Path, directory: Path) -> Iterator[Import]:
    """Give what a file imports, in its functions, too.

    Args:
        path: of the file.
        directory: from which its package is imported: that names what is relative.
    """
    tree = parsed(path)
    typed = {id(one) for node in ast.walk(tree) if _is_for_types(node) for one in ast.walk(node)}
    package = path.relative_to(directory).parts[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(one.name, node.lineno, "", id(node) in typed) for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            name = ".".join(filter(None, (*above, node.module)))
            yield from (Import(name, node.lineno, one.name, id(node) in typed) for one in node.names)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) and not node.orelse


def reached(file: Path, directory: Path, files: tuple[Path, ...]) -> tuple[Path, ...]:
    """Give those of `files` that are imported with `file`: packages above it, and what all of them import."""
    homes = {_module(one, directory): one for one in files}
    found: dict[Path, None] = {}
    open_ = [_module(file, directory)]
    while open_:
        parts = open_.pop().split(".")
        for above in (".".join(parts[:count]) for count in range(1, len(parts) + 1)):
            home = homes.get(above)
            if home is not None and home not in found:
                found[home] = None
                open_ += [
                    f"{one.name}.{one.given}".strip(".") for one in imports(home, directory) if not one.is_for_types
                ]
    return tuple(one for one in files if one in found)


def _module(file: Path, directory: Path) -> str:
    parts = file.relative_to(directory).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
