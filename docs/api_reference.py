"""Describe what `from hookd import …` offers to a plugin: a page made from signatures and docstrings.

griffe reads them from the source, so nothing of hookd runs for it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import griffe

import hookd

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = Path(__file__).resolve().parent.parent
PARTS: dict[str, tuple[str, ...]] = {
    "A plugin": ("Plugin", "Rate", "TrainingError", "PluginError", "HookdError"),
    "Its context": ("Context",),
    "Metrics": ("Counter", "CounterChild", "Gauge", "GaugeChild", "Histogram", "HistogramChild"),
    "What hooks receive": ("Module", "Call", "Returned"),
    "Numbers of tensors": ("Summary", "Largest", "Digest", "Extent"),
    "Devices": ("Accelerator", "accelerator_of", "accelerators", "may_have_devices"),
    "Alarms and rates": ("Alarm", "RecentRate"),
    "Options": ("Globs",),
    "Reading modules and optimizers": (
        "peek", "attributes_of", "parameters_of", "buffers_of", "children_of", "modules_in", "parameters_in", "originals_of",
        "groups_of", "of_tensor", "hooks_on",
    ),
    "Names of modules and parameters": ("name_within", "names_above", "owner_of"),
    "Reading inputs and outputs": ("tensors", "is_whole", "versions", "tensor_ref", "training_stack"),
}  # fmt: skip
"""The parts of the page, with the classes and functions that each describes."""
ELSEWHERE = {
    "API_VERSION",
    "__version__",
    "hookimpl",
    "Observation",
    "observe",
    "read",
    "start",
    "stop",
    "load_ipython_extension",
}
"""What other pages describe: plugins.md and integrations.md."""
HIDDEN = {"requests", "plugin", "refuse", "retire", "of_sums", "is_usual", "as_json", "kind", "child", "cells"}
"""Members that plugins do not need."""
HEAD = """# The API of plugins

This is what `from hookd import …` offers to a plugin. [Hooks](hooks.md) describes the methods that a plugin implements, and
[Writing a plugin](../plugins.md) how they go together. Annotations show the types; torch's own are those of its documentation.
"""


def page() -> str:
    """Return the page."""
    described = {name for names in PARTS.values() for name in names}
    missing = set(hookd.__all__) - described - ELSEWHERE
    assert not missing, f"PARTS in docs/api_reference.py lacks {missing}"
    package = griffe.load("hookd", search_paths=[REPOSITORY], allow_inspection=False, docstring_parser="google")
    metrics = package["api.metrics"]
    text = HEAD
    for title, names in PARTS.items():
        found = [_target(package[name] if name in package.members else metrics[name]) for name in names]
        text += f"\n## {title}\n" + _index(found) + "".join(_described(one) for one in found)
    return text


def _target(one: Any) -> Any:
    return one.final_target if one.is_alias else one


def _index(found: list[Any]) -> str:
    """Return a table of the functions of a part, or of the members of its only class, each with a link."""
    rows = [member for member in _members(found[0]) if _is_called(member)] if len(found) == 1 else found
    if len(rows) < 4:  # noqa: PLR2004  fewer are found without a table
        return ""
    word = "member" if len(found) == 1 else "name"
    prefix = found[0].name.lower() if len(found) == 1 else ""
    lines = [f"| [`{one.name}`](#{prefix}{one.name.lower()}) | {_cell(_summary(one))} |" for one in rows]
    return f"\n| {word} | what it does |\n|---|---|\n" + "\n".join(lines) + "\n"


def _described(one: Any) -> str:
    if not one.is_class:
        return f"\n### {one.name}\n\n```python\n{one.signature()}\n```\n{_sections(one)}"
    text = f"\n### {one.name}\n{_sections(one, _defaults(one))}"
    for member in _members(one):
        if _is_called(member):
            text += f"\n#### {one.name}.{member.name}\n\n```python\n{_signature(member)}\n```\n{_sections(member)}"
    return text


def _members(kind: Any) -> Iterator[Any]:
    """Yield the public members of a class, with those that it inherits from a private one."""
    inherited = {name: one for base in kind.mro() if base.name.startswith("_") for name, one in base.members.items()}
    for name, member in {**inherited, **kind.members}.items():
        plain = inherited[name] if name in inherited and not member.docstring else member
        if not name.startswith("_") and name not in HIDDEN and plain.docstring:
            yield plain


def _is_called(member: Any) -> bool:
    return bool(member.is_function or "property" in member.labels)


def _signature(member: Any) -> str:
    if member.is_function:
        return re.sub(r"\(self(, )?", "(", member.signature())
    return f"{member.name}: {member.annotation}"


def _defaults(kind: Any) -> dict[str, str]:
    values = {name: str(one.value) for name, one in kind.members.items() if one.is_attribute and one.value is not None}
    return {} if any("self." in value or value == name for name, value in values.items()) else values


def _summary(one: Any) -> str:
    return str(one.docstring.value).split("\n\n")[0].replace("\n", " ").rstrip(":")


def _sections(one: Any, defaults: dict[str, str] | None = None) -> str:
    text = ""
    for section in one.docstring.parsed:
        if section.kind.value == "text":
            text += f"\n{section.value}\n"
        elif section.kind.value == "attributes":
            rows = [row for row in section.value if row.name not in HIDDEN]
            text += _attributes(rows, defaults or {})
        elif section.kind.value == "parameters":
            text += "\n" + "".join(f"- `{row.name}`: {_line(row.description)}\n" for row in section.value)
        elif section.kind.value == "returns":
            text += "\nReturns: " + " ".join(_line(row.description) for row in section.value) + "\n"
        elif section.kind.value == "raises":
            text += (
                "\nRaises: "
                + "; ".join(f"`{row.annotation}`: {_line(row.description)}" for row in section.value)
                + "\n"
            )
    return text


def _attributes(rows: list[Any], defaults: dict[str, str]) -> str:
    if defaults:
        lines = [f"| `{row.name}` | `{defaults.get(row.name, '')}` | {_cell(row.description)} |" for row in rows]
        return "\n| attribute | default | meaning |\n|---|---|---|\n" + "\n".join(lines) + "\n"
    lines = [f"| `{row.name}` | {_cell(row.description)} |" for row in rows]
    return "\n| attribute | meaning |\n|---|---|\n" + "\n".join(lines) + "\n"


def _line(text: str) -> str:
    return re.sub(r"\s*\n\s*", " ", text).strip()


def _cell(text: str) -> str:
    return _line(text).replace("|", r"\|")
