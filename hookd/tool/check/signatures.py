"""Check the names, arguments and results of hooks, before the agent or the daemon refuses them."""

from __future__ import annotations

import ast
import inspect
from typing import TYPE_CHECKING

from hookd.api import compatibility, hookspecs
from hookd.api.compatibility import nearest
from hookd.errors import PluginError
from hookd.serving import hookspecs as daemon_hooks
from hookd.tool.attach.sources import last_name
from hookd.tool.check import in_place
from hookd.tool.check.problem import Problem
from hookd.tool.check.source import assigned, hooks

ALWAYS = ("configure", "select", "succeed")
"""Hooks with a single argument that is always passed, whatever their signature says."""

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hookd.tool.check.source import Subject


def problems(subject: Subject) -> Iterator[Problem]:
    """Yield the problems of a plugin's name, API version and hooks."""
    node, file = subject.tree, str(subject.file)
    if not subject.name:
        fix = f'write name = "{subject.class_name.lower()}" in the class: the middle of all its metrics\' names'
        yield Problem(file, node.lineno, "name", f"{subject.class_name} has no name", fix)
    marked = [(str(path), hook) for path, part in subject.parts for hook in hooks(part)]
    known = specs(subject)
    for path, hook in marked:
        yield from _hook(path, hook, known, " in the daemon" if subject.side == "daemon" else "")
    if subject.side == "daemon":
        return
    yield from _api(subject, node)
    may_return = any(_mutates(part) for _, part in subject.parts)
    for source, part in subject.parts:
        yield from _never_called(str(source), part)
        yield from _naming(str(source), part)
    for path, hook in marked:
        if hook.name in known and hook.name not in ("select", "configure") and not may_return:
            yield from _returns(path, hook.name, hook)
            yield from in_place.problems(path, hook.name, hook, walk_own(hook))


def specs(subject: Subject) -> dict[str, inspect.Signature]:
    """Return the signatures of all hooks of this part of a plugin, by name."""
    module = daemon_hooks if subject.side == "daemon" else hookspecs
    return {name: inspect.signature(getattr(module, name)) for name in module.HOOKS}


def _never_called(file: str, part: ast.ClassDef) -> Iterator[Problem]:
    """Yield the methods that look like hooks but are not."""
    for node in part.body:
        if isinstance(node, ast.AsyncFunctionDef) and "hookimpl" in map(last_name, node.decorator_list):
            yield Problem(
                file, node.lineno, "hook", f"{node.name} is async, but hooks are not awaited", "write def alone"
            )
        if isinstance(node, ast.FunctionDef) and node.name in hookspecs.HOOKS and not node.decorator_list:
            yield Problem(file, node.lineno, "hook", f"{node.name} has the name of a hook, but is never called",
                          "write @hookimpl above it, or rename it", is_warning=True)  # fmt: skip


def _api(subject: Subject, node: ast.ClassDef) -> Iterator[Problem]:
    required = assigned(node, "requires_api")
    try:
        compatibility.check(subject.name, required if isinstance(required, str) else "")
    except PluginError as error:
        yield Problem(str(subject.file), node.lineno, "api", error.message, error.hint)


def _naming(file: str, part: ast.ClassDef) -> Iterator[Problem]:
    """Yield the attributes that should name hooks but do not, and those that do not exist any more.

    The hooks meant would be called at other steps than their author believes.
    """
    for node in part.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            name = target.id if isinstance(target, ast.Name) else ""
            if name in compatibility.NAMING:
                yield from _named(file, name, node.value)  # type: ignore[attr-defined]
            if name in compatibility.FORMER:
                message = f"plugins do not have the attribute {name} any more"
                yield Problem(file, node.lineno, "api", message, compatibility.FORMER[name])


def _named(file: str, attribute: str, value: ast.expr | None) -> Iterator[Problem]:
    if isinstance(value, ast.Constant):
        yield Problem(file, value.lineno, "hook", f"{attribute} is {value.value!r}, but must be a tuple of hook names",
                      f'write {attribute} = ("forward",), with the comma')  # fmt: skip
    items = (
        value.elts if isinstance(value, (ast.Tuple, ast.List)) else value.keys if isinstance(value, ast.Dict) else ()
    )
    for item in items:
        if isinstance(item, ast.Constant) and item.value not in hookspecs.HOOKS:
            yield Problem(file, item.lineno, "hook", f"{attribute} names {item.value!r}, but there is no such hook",
                          nearest(str(item.value), hookspecs.HOOKS))  # fmt: skip


def _mutates(node: ast.ClassDef) -> bool:
    return assigned(node, "mutates") is True or any(
        isinstance(child, (ast.Assign, ast.AnnAssign)) and "mutating" in ast.dump(child) for child in node.body
    )


def _hook(file: str, node: ast.FunctionDef, known: Mapping[str, inspect.Signature], where: str) -> Iterator[Problem]:
    if node.name not in known:
        yield Problem(file, node.lineno, "hook", f"there is no hook {node.name!r}{where}", nearest(node.name, known))
        return
    yield from _wrappers(file, node.name, node)
    yield from _arguments(file, node.name, node, list(known[node.name].parameters))


def _wrappers(file: str, hook: str, node: ast.FunctionDef) -> Iterator[Problem]:
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and {"wrapper", "hookwrapper"} & {
            keyword.arg for keyword in decorator.keywords
        }:
            yield Problem(
                file, node.lineno, "wrapper", f"{hook} is a hook wrapper; hookd refuses these", "write @hookimpl alone"
            )


def _arguments(file: str, hook: str, node: ast.FunctionDef, allowed: Sequence[str]) -> Iterator[Problem]:
    given = node.args
    names = [*given.posonlyargs, *given.args]
    if not names or names[0].arg in allowed:
        yield Problem(file, node.lineno, "argument", f"{hook} has no self", "hooks are plain methods: write self first")
        return
    if hook in ALWAYS and len(names) < 2 and not given.vararg:
        yield Problem(file, node.lineno, "argument", f"{hook} does not take {allowed[0]!r}, which is always passed",
                      f"write def {hook}(self, {allowed[0]})")  # fmt: skip
    for star in (given.vararg, given.kwarg, *given.kwonlyargs):
        if star is not None:
            yield Problem(file, star.lineno, "argument", f"{hook} takes {star.arg!r}, which is not a plain argument",
                          f"ask for what you need by name: {', '.join(allowed)}")  # fmt: skip
    for argument in names[-len(given.defaults) :] if given.defaults else []:
        yield Problem(file, argument.lineno, "default", f"{hook} gives {argument.arg!r} a default, which hides the value",
                      f"write {argument.arg} without a default")  # fmt: skip
    for argument in names[1:]:
        if argument.arg not in allowed:
            yield Problem(file, argument.lineno, "argument", f"{hook} has no argument {argument.arg!r}",
                          nearest(argument.arg, allowed))  # fmt: skip


def _returns(file: str, hook: str, node: ast.FunctionDef) -> Iterator[Problem]:
    for statement in walk_own(node):
        if isinstance(statement, ast.Return) and statement.value is not None:
            if isinstance(statement.value, ast.Constant) and statement.value.value is None:
                continue
            yield Problem(file, statement.lineno, "return", f"{hook} returns a value, but an observer must not",
                          "return nothing; or set mutates = True, and enable the plugin by name")  # fmt: skip


def walk_own(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of nested functions and classes."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            yield child
            yield from walk_own(child)
