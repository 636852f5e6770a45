"""Whether a plugin can be found and imported where it runs: what it imports, how its module is called, and its name."""

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
_WRITE = {"target": "import from hookd alone", "daemon": "import from hookd and hookd.serving alone"}
_APART = "keep the halves in modules of their own, and the __init__.py above them free of both"


def problems(subject: Subject) -> Iterator[Problem]:
    """Give what would keep a plugin from being found or imported: in a target, or in the daemon."""
    file, line = str(subject.file), subject.tree.lineno
    if subject.name and not is_name(subject.name):
        yield Problem(file, line, "name", f"{subject.name!r} cannot be a plugin's name",
                      "use a lower-case word that no core metric begins with")  # fmt: skip
    top = subject.module.partition(".")[0]
    if not top.startswith("hookd"):
        who = "a training" if subject.half == "target" else "the daemon"
        yield Problem(file, 1, "name", f"the module {top!r} may be one that {who} has as well",
                      f"call it hookd_{top}", is_warning=True)  # fmt: skip
    for path in subject.files:
        for one in imports(path, subject.directory):
            told = _told(subject, one, is_imported=path in subject.imported and not one.is_for_types)
            top = one.name.partition(".")[0]
            if told:
                yield Problem(str(path), one.line, "import", *told)
            elif subject.half == "target" and not one.is_for_types and not _is_there(top, subject):
                yield _left_behind(subject, one.line, top) or _foreign(str(path), one.line, top)


def _told(subject: Subject, one: Import, *, is_imported: bool) -> tuple[str, str] | None:
    """Say what is wrong with an import, and what to do."""
    name = "hookd.serving" if (one.name, one.given) == ("hookd", "serving") else one.name
    is_torch = one.name.partition(".")[0] == "torch"
    if subject.half == "daemon" and is_torch and is_imported:
        return f"the daemon never imports torch, and {subject.class_name} is imported there with this", _APART
    if subject.half == "daemon" and (one.name, one.given) == ("hookd", "hookimpl") and is_imported:
        return "this hookimpl marks hooks of the target", "import hookimpl from hookd.serving"
    if subject.half == "target" and name == "hookd.serving":
        told = f"a target has no hookd.serving, and {subject.class_name} is imported there with this"
        return (told, _APART) if is_imported else None
    if name.startswith("hookd.") and name not in _PUBLIC[subject.half]:
        return f"{name} is no public API of hookd", _WRITE[subject.half]
    return None


def _is_there(top: str, subject: Subject) -> bool:
    """Whether a module is in each target, or comes with the plugin."""
    own = top == subject.module if _is_single(subject) else _beside(top, subject) is not None
    return top in sys.stdlib_module_names or top in ("hookd", "torch", "pluggy") or own


def _is_single(subject: Subject) -> bool:
    """Whether a plugin is one file, which alone is carried."""
    return subject.files == (subject.file,) and subject.file.name != "__init__.py" and "." not in subject.module


def _beside(top: str, subject: Subject) -> Path | None:
    """Give the file or folder of a module in the folder from which a plugin is imported."""
    file, folder = subject.directory / f"{top}.py", subject.directory / top
    return file if file.exists() else folder if folder.is_dir() else None


def _left_behind(subject: Subject, line: int, top: str) -> Problem | None:
    """Say that what lies beside a single file stays there; what is installed beside it may be a declared dependency."""
    beside = _beside(top, subject)
    if beside is None or {"site-packages", "dist-packages"} & {*subject.directory.parts}:
        return None
    fix = f"put both into a package: a folder with an __init__.py, {subject.file.name} and {beside.name}"
    return Problem(str(subject.file), line, "import", f"{beside.name} is not carried, only {subject.file.name} is", fix)


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
