"""All rules that read a plugin's source, except the types, for which mypy is needed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hookd.errors import PluginError
from hookd.tool.check import attributes, blocking, names, packaging, signatures, source
from hookd.tool.check.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hookd.tool.check.source import Subject


def problems(subject: Subject, all_subjects: Sequence[Subject]) -> list[Problem]:
    """Return the problems in a plugin's source, sorted.

    Args:
        subject: the plugin.
        all_subjects: all plugins that are checked, of which one may be its other side.
    """
    try:
        found = _problems(subject, all_subjects)
    except RecursionError:
        why = "its code is nested too deeply to be checked"
        found = [Problem(str(subject.file), subject.tree.lineno, "source", why, "split the expression")]
    return sorted(set(found))


def _problems(subject: Subject, all_subjects: Sequence[Subject]) -> list[Problem]:
    found = [*signatures.problems(subject), *packaging.problems(subject)]
    if subject.side == "target":
        found += [*blocking.problems(subject), *attributes.problems(subject)]
    else:
        others = (other for other in all_subjects if other.side == "target" and other.name == subject.name)
        found += (problem for other in others for problem in names.twice(subject, other))
    return found + [problem for file in subject.files for problem in names.declared(file, subject.side)]


def require_sound(name: str, place: str) -> None:
    """Raise if the source of a plugin for targets has problems that are not only warnings.

    Args:
        name: of the plugin.
        place: the file or package that it is in, or "" for an installed plugin.

    Raises:
        PluginError: reason "faulty".
    """
    subjects = source.subjects(place or name, unread=[])
    chosen = [subject for subject in subjects if subject.name == name and subject.side == "target"]
    errors = [one for subject in chosen for one in problems(subject, subjects) if not one.is_warning]
    if errors:
        first, more = errors[0], len(errors) - 1
        rest = f"; and {more} more problem{'s' * (more > 1)}" if more else ""
        shown = Path(place).parent if Path(place).name == "__init__.py" else place or name
        hint = f"`hookd plugin check {shown}` says how to fix it; --force loads it as it is."
        raise PluginError(f"{name} is faulty: {first.where}: {first.message}{rest}", reason="faulty", hint=hint)
