"""Whether a plugin can travel: what it imports, how its module is called, and its entry point."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hookd.api import is_name
from hookd.check.problem import Problem
from hookd.check.source import dotted, parsed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookd.check.source import Subject


def problems(subject: Subject) -> Iterator[Problem]:
    """Give what would keep a plugin from being found or imported in a target."""
    file, line = str(subject.file), subject.tree.lineno
    if subject.name and not is_name(subject.name):
        yield Problem(file, line, "name", f"{subject.name!r} cannot be a plugin's name",
                      "use a lower-case word that no core metric begins with")  # fmt: skip
    top = subject.module.partition(".")[0]
    if not top.startswith("hookd"):
        yield Problem(file, 1, "name", f"the module {top!r} may be one that a training has as well",
                      f"call it hookd_{top}", is_warning=True)  # fmt: skip
    for path in subject.files:
        for line, name in _imports(parsed(path)):
            if re.match(r"hookd\.", name):
                yield Problem(str(path), line, "import", f"{name} is no public API of hookd", "import from hookd alone")
            elif not _is_there(name.partition(".")[0], subject.directory):
                yield _foreign(str(path), line, name.partition(".")[0])


def _imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Give the line and the name of each module that is imported when the plugin runs."""
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and dotted(node.test).rpartition(".")[2] == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) not in guarded and isinstance(node, ast.ImportFrom) and not node.level:
            yield node.lineno, node.module or ""
        elif id(node) not in guarded and isinstance(node, ast.Import):
            yield from ((node.lineno, one.name) for one in node.names)


def _is_there(top: str, directory: Path) -> bool:
    """Whether a module is in each target, or comes with the plugin."""
    own = (directory / f"{top}.py").exists() or (directory / top).is_dir()
    return top in sys.stdlib_module_names or top in ("hookd", "torch", "pluggy") or own


def _foreign(file: str, line: int, top: str) -> Problem:
    spec = importlib.util.find_spec(top)
    homes = (spec.submodule_search_locations if spec is not None else None) or ()
    if any(next(Path(home).rglob("*.so"), None) for home in homes):
        message = f"{top} has compiled code, which is not carried into a target: one without {top} refuses the plugin"
    else:
        message = (
            f"{top} comes along only as a declared dependency of a package; else a target without it refuses the plugin"
        )
    fix = "use torch and the standard library; what is carried is in docs/plugins-shipping.md"
    return Problem(file, line, "import", message, fix, is_warning=True)
