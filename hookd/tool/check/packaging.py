"""Check that a plugin can be found and imported where it runs.

This depends on its imports, its module name and its own name.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hookd.api.compatibility import is_name
from hookd.tool.check.imports import imports
from hookd.tool.check.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookd.tool.check.imports import Import
    from hookd.tool.check.source import Subject

_PUBLIC = {"target": ("hookd",), "daemon": ("hookd", "hookd.serving")}
_WRITE = {"target": "import only from hookd", "daemon": "import only from hookd and hookd.serving"}
_APART = "keep both parts of the plugin in separate modules, and import neither in the __init__.py above them"


def problems(subject: Subject) -> Iterator[Problem]:
    """Yield the reasons why a target or the daemon could not find or import a plugin."""
    file, line = str(subject.file), subject.tree.lineno
    if subject.name and not is_name(subject.name):
        yield Problem(file, line, "name", f"{subject.name!r} cannot be a plugin's name",
                      "use a lower-case word that is not the first word of a core metric")  # fmt: skip
    top = subject.module.partition(".")[0]
    if not top.startswith("hookd"):
        where = "the training" if subject.side == "target" else "the daemon"
        yield Problem(file, 1, "name", f"the module {top!r} may conflict with one of {where}",
                      f"call it hookd_{top}", is_warning=True)  # fmt: skip
    for path in subject.files:
        for each in imports(path, subject.directory):
            mistake = _mistake(subject, each, is_imported=path in subject.imported and not each.is_for_types)
            top = each.name.partition(".")[0]
            if mistake:
                yield Problem(str(path), each.line, "import", *mistake)
            elif subject.side == "target" and not each.is_for_types and not _is_there(top, subject):
                yield _left_behind(subject, each.line, top) or _foreign(str(path), each.line, top)


def _mistake(subject: Subject, each: Import, *, is_imported: bool) -> tuple[str, str] | None:
    """Return what is wrong with an import and how to fix it, or None.

    Args:
        subject: the plugin.
        each: the import.
        is_imported: whether it is executed when the plugin's class is imported.
    """
    name = "hookd.serving" if (each.name, each.given) == ("hookd", "serving") else each.name
    is_torch = each.name.partition(".")[0] == "torch"
    if subject.side == "daemon" and is_torch and is_imported:
        return f"the daemon never imports torch, but the import of {subject.class_name} there includes this", _APART
    if subject.side == "daemon" and (each.name, each.given) == ("hookd", "hookimpl") and is_imported:
        return "this hookimpl marks hooks for the target", "import hookimpl from hookd.serving"
    if subject.side == "target" and name == "hookd.serving":
        message = f"a target has no hookd.serving, but the import of {subject.class_name} there includes this"
        return (message, _APART) if is_imported else None
    if name.startswith("hookd.") and name not in _PUBLIC[subject.side]:
        return f"{name} is not part of hookd's public API", _WRITE[subject.side]
    return None


def _is_there(top: str, subject: Subject) -> bool:
    """Whether every target has a module, or the plugin contains it."""
    own = top == subject.module if _is_single(subject) else _beside(top, subject) is not None
    return top in sys.stdlib_module_names or top in ("hookd", "torch", "pluggy") or own


def _is_single(subject: Subject) -> bool:
    """Whether a plugin is a single file: nothing else is carried then."""
    return subject.files == (subject.file,) and subject.file.name != "__init__.py" and "." not in subject.module


def _beside(top: str, subject: Subject) -> Path | None:
    """Return the file or folder of a module next to a plugin, or None."""
    file, folder = subject.directory / f"{top}.py", subject.directory / top
    return file if file.exists() else folder if folder.is_dir() else None


def _left_behind(subject: Subject, line: int, top: str) -> Problem | None:
    """Return a problem if a module is next to a single-file plugin: it is not carried."""
    beside = _beside(top, subject)
    # An installed module may be a declared dependency.
    if beside is None or {"site-packages", "dist-packages"} & {*subject.directory.parts}:
        return None
    fix = f"put both into a package: a folder with an __init__.py, {subject.file.name} and {beside.name}"
    return Problem(str(subject.file), line, "import", f"{beside.name} is not carried, only {subject.file.name} is", fix)


def _foreign(file: str, line: int, top: str) -> Problem:
    spec = importlib.util.find_spec(top)
    homes = (spec.submodule_search_locations if spec is not None else None) or ()
    if any(next(Path(home).rglob("*.so"), None) for home in homes):
        message = f"{top} has compiled code, which is not carried: a target without {top} refuses the plugin"
    else:
        message = f"{top} is carried only as a declared dependency of a package; otherwise a target without it refuses the plugin"
    fix = "use torch and the standard library; docs/plugins-shipping.md lists what is carried"
    return Problem(file, line, "import", message, fix, is_warning=True)
