"""Describe the output of each command with `--json`: a page for readers, and a JSON Schema for programs.

Both are made from the TypedDicts in `hookd.wire`, `hookd.tool.cli.outputs` and the modules of the commands.
"""

from __future__ import annotations

import ast
import collections.abc
import functools
import importlib
import inspect
import json
import re
from itertools import pairwise
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hookd_capture.bundle import result

import hookd.errors
from hookd.testing import trials
from hookd.tool.check import problem
from hookd.tool.check import report as check_report
from hookd.tool.cli import diff, fingerprint, loaded, outputs, plugin, plugin_check, ps, record, status, targets
from hookd.tool.cli import stack as cli_stack
from hookd.tool.daemon.plugins import rows
from hookd.wire import agent, answer, identity, incident, model, stack, target
from hookd.wire import fingerprint as fingerprints
from hookd.wire import report as reports

MODULES = (
    agent, answer, identity, incident, model, reports, stack, target, hookd.errors, trials, problem, check_report, loaded,
    diff, fingerprint, fingerprints, outputs, plugin, plugin_check, ps, record, cli_stack, status, targets, rows,
    result,
)  # fmt: skip
"""The modules that define what is described here."""
OUTPUTS: dict[str, Any] = {
    "hookd ps": outputs.Processes,
    "hookd attach": outputs.Attaches,
    "hookd detach": outputs.Detaches,
    "hookd status": outputs.Status,
    "hookd report PID": reports.Report,
    "hookd report RUN": reports.RunReport,
    "hookd report '#NUMBER'": reports.IncidentReport,
    "hookd incidents": outputs.Incidents,
    "hookd top": list[outputs.TopRow],
    "hookd top PID": outputs.TopTarget,
    "hookd stack": cli_stack.ShownStacks,
    "hookd snapshot": model.Models,
    "hookd eval": answer.EvaluatedTarget,
    "hookd trace": outputs.TraceFile,
    "hookd record": record.Summary,
    "hookd fingerprint PID": fingerprint.RecordedFile,
    "hookd fingerprint --twice": list[diff.Parting],
    "hookd fingerprint --list": list[fingerprints.KeptRow],
    "hookd diff": diff.Parting,
    "hookd plugin list": outputs.PluginList,
    "hookd plugin list PID": outputs.LoadedPlugins,
    "hookd plugin enable": answer.ChangedTarget,
    "hookd plugin disable": answer.ChangedTarget,
    "hookd plugin config": answer.ChangedTarget,
    "hookd plugin reload": answer.ChangedTarget,
    "hookd plugin check": outputs.PluginReports,
    "hookd plugin bench": outputs.BenchRows,
    "hookd plugin new": outputs.NewPlugin,
    "hookd config check": outputs.CheckedConfig,
    "hookd replay": result.Replayed,
    "hookd doctor": outputs.Checks,
    "hookd version": outputs.Versions,
}
"""By command, the type of what it prints."""
ARRAYS, OBJECTS = (list, tuple, collections.abc.Sequence), (dict, collections.abc.Mapping)
SIMPLE: dict[Any, dict[str, Any]] = {
    str: {"type": "string"}, int: {"type": "integer"}, float: {"type": "number"}, bool: {"type": "boolean"},
    type(None): {"type": "null"}, Any: {}, object: {},
}  # fmt: skip
HEAD = """# JSON

What each command prints on stdout with `--json`, field by field. [json.schema.json](json.schema.json) has the same as JSON
Schema (2020-12): one definition for each command, by its words, and one for each type.

- JSON lacks NaN and the infinities: they are null, and in the free fields of an incident the texts `"nan"`, `"inf"` and
  `"-inf"`.
- Fields marked with * may be absent.
- If a command fails, it prints an [ErrorAnswer](#erroranswer) instead, and its exit code is not 0.
- Newer versions may add fields. A field that is removed or changes its meaning is in the changelog.

## Commands

| command | output |
|---|---|
"""


def page() -> str:
    """Describe the outputs of all commands, and the types in them."""
    _resolve()
    text = HEAD + "".join(f"| `{words}` | {_link(kind)} |\n" for words, kind in OUTPUTS.items())
    return text + "\n## Types\n" + "".join(map(_described, sorted(_types(), key=lambda kind: str(kind.__name__))))


def schema() -> str:
    """Return the schema: one definition for each command, and one for each type."""
    _resolve()
    types = {kind.__name__: _object(kind) for kind in _types()}
    commands = {words: _schema(kind) for words, kind in OUTPUTS.items()}
    whole = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": commands | dict(sorted(types.items()))}
    return json.dumps(whole, indent=1) + "\n"


def _resolve() -> None:
    """Add to each module the names that it imports for its annotations only, so that these can be evaluated."""
    names: dict[str, Any] = {"Mapping": collections.abc.Mapping, "Sequence": collections.abc.Sequence}
    for module in MODULES:
        names |= {name: one for name, one in vars(module).items() if _is_typed(one)}
    for module in MODULES:
        for name, one in names.items():
            vars(module).setdefault(name, one)


def _is_typed(one: object) -> bool:
    return isinstance(one, type) and issubclass(one, dict) and hasattr(one, "__required_keys__")


def _types() -> list[Any]:
    """Return the types in the outputs, each once."""
    found: dict[Any, None] = {hookd.errors.ErrorAnswer: None}
    due = list(OUTPUTS.values())
    while due:
        kind = due.pop()
        if not _is_typed(kind):
            due += getattr(kind, "__args__", ())
        elif kind not in found:
            found[kind] = None
            due += get_type_hints(kind).values()
    return list(found)


def _described(kind: Any) -> str:
    meanings, hints = _meanings(kind), get_type_hints(kind)
    text = f"\n### {kind.__name__}\n\n{inspect.getdoc(kind)}\n\n| field | type | meaning |\n|---|---|---|\n"
    for name, hint in hints.items():
        star = "" if name in kind.__required_keys__ else "*"
        text += f"| `{name}`{star} | {_link(hint)} | {meanings.get(name, '')} |\n"
    return text


def _meanings(kind: Any) -> dict[str, str]:
    """Return the text below each field, in the class and its bases."""
    found: dict[str, str] = {}
    due: list[Any] = [kind]
    while due:
        one = due.pop()
        source = _sources(one.__module__).get(one.__name__)
        if source is None:  # a TypedDict in functional syntax
            continue
        module = vars(importlib.import_module(one.__module__))
        due += [module[base.id] for base in source.bases if isinstance(base, ast.Name) and base.id != "TypedDict"]
        for field, text in pairwise(source.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found.setdefault(ast.unparse(field.target), re.sub(r"\s+", " ", str(text.value.value)))
    return found


@functools.cache
def _sources(module: str) -> dict[str, ast.ClassDef]:
    """Return the sources of the classes of a module: a TypedDict does not know its bases (CPython before 3.12)."""
    tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _link(kind: Any) -> str:
    """Return a type in words, with links to the types in it."""
    arguments = get_args(kind)
    if _is_typed(kind):
        return f"[{kind.__name__}](#{kind.__name__.lower()})"
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(map(_link, arguments))
    if get_origin(kind) is Literal:
        return " or ".join(f'`"{one}"`' for one in arguments)
    if get_origin(kind) in ARRAYS:
        return f"list of {_link(arguments[0])}"
    if get_origin(kind) in OBJECTS:
        return f"object of {_link(arguments[1])}"
    return SIMPLE[kind]["type"] if SIMPLE[kind] else "any"


def _schema(kind: Any) -> dict[str, Any]:
    """Return the JSON Schema of a type."""
    arguments = get_args(kind)
    if _is_typed(kind):
        return {"$ref": f"#/$defs/{kind.__name__}"}
    if get_origin(kind) in (Union, UnionType):
        return {"anyOf": [_schema(one) for one in arguments]}
    if get_origin(kind) is Literal:
        return {"enum": list(arguments)}
    if get_origin(kind) in ARRAYS:
        return {"type": "array", "items": _schema(arguments[0])}
    if get_origin(kind) in OBJECTS:
        return {"type": "object", "additionalProperties": _schema(arguments[1])}
    return dict(SIMPLE[kind])


def _object(kind: Any) -> dict[str, Any]:
    """Return the JSON Schema of a TypedDict; further fields are allowed, because newer versions add some."""
    meanings = _meanings(kind)
    fields = {
        name: {**_schema(hint), **({"description": meanings[name]} if name in meanings else {})}
        for name, hint in get_type_hints(kind).items()
    }
    required = [name for name in fields if name in kind.__required_keys__]
    return {"description": inspect.getdoc(kind), "type": "object", "properties": fields, "required": required}
