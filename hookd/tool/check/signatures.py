"""Whether the hooks of a class are hooks, and ask for what there is: what agent or daemon would refuse, said beforehand."""

from __future__ import annotations

import ast
import inspect
import re
from typing import TYPE_CHECKING

from hookd.api import compatibility, hookspecs
from hookd.api.compatibility import nearest
from hookd.errors import PluginError
from hookd.serving import hookspecs as daemon_hooks
from hookd.tool.check.problem import Problem
from hookd.tool.check.source import assigned, hooks, last_name

ALWAYS = ("configure", "select", "succeed")
"""Hooks of one argument, which are called with it whatever they ask for."""
_IN_PLACE = re.compile(r"[^_]_$")
_DAEMON_HOOKS = tuple(name for name, value in vars(daemon_hooks).items() if hasattr(value, "hookd_daemon_spec"))

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hookd.tool.check.source import Subject


def problems(subject: Subject) -> Iterator[Problem]:
    """Give what is wrong with the names, arguments and results of a plugin's hooks."""
    node, file = subject.tree, str(subject.file)
    if not subject.name:
        fix = f'write name = "{subject.class_name.lower()}" in the class: the middle of all its metrics\' names'
        yield Problem(file, node.lineno, "name", f"{subject.class_name} has no name", fix)
    marked = [(str(path), hook) for path, part in subject.parts for hook in hooks(part)]
    if subject.half == "daemon":
        for path, hook in marked:
            yield from _daemon_hook(path, hook)
        return
    yield from _api(subject, node)
    may_return = any(_mutates(part) for _, part in subject.parts)
    for source, part in subject.parts:
        yield from _never_called(str(source), part)
        yield from _naming(str(source), part)
    for path, hook in marked:
        yield from _hook(path, hook, may_return=may_return)


def specs(subject: Subject) -> dict[str, inspect.Signature]:
    """Give the hooks that there are for the half of a plugin, and how each is called."""
    module, names = (daemon_hooks, _DAEMON_HOOKS) if subject.half == "daemon" else (hookspecs, tuple(hookspecs.HOOKS))
    return {name: inspect.signature(getattr(module, name)) for name in names}


def _never_called(file: str, part: ast.ClassDef) -> Iterator[Problem]:
    """Find methods that look like hooks and are none."""
    for one in part.body:
        if isinstance(one, ast.AsyncFunctionDef) and "hookimpl" in map(last_name, one.decorator_list):
            yield Problem(file, one.lineno, "hook", f"{one.name} is async, and nobody awaits a hook", "write def alone")
        if isinstance(one, ast.FunctionDef) and one.name in hookspecs.HOOKS and not one.decorator_list:
            yield Problem(file, one.lineno, "hook", f"{one.name} has the name of a hook and is never called",
                          "write @hookimpl above it, or call it otherwise", is_warning=True)  # fmt: skip


def _api(subject: Subject, node: ast.ClassDef) -> Iterator[Problem]:
    required = assigned(node, "requires_api")
    try:
        compatibility.check(subject.name, required if isinstance(required, str) else "")
    except PluginError as error:
        yield Problem(str(subject.file), node.lineno, "api", error.message, error.hint)


def _naming(file: str, part: ast.ClassDef) -> Iterator[Problem]:
    """Find attributes that should name hooks, and name none: such hooks would be called at every step."""
    for one in part.body:
        targets = one.targets if isinstance(one, ast.Assign) else [one.target] if isinstance(one, ast.AnnAssign) else []
        for target in targets:
            if isinstance(target, ast.Name) and target.id in compatibility.NAMING:
                yield from _named(file, target.id, one.value)  # type: ignore[attr-defined]


def _named(file: str, attribute: str, value: ast.expr | None) -> Iterator[Problem]:
    if isinstance(value, ast.Constant):
        yield Problem(file, value.lineno, "hook", f"{attribute} is {value.value!r}, and must be a tuple of hook names",
                      f'write {attribute} = ("forward",), with the comma')  # fmt: skip
    for one in value.elts if isinstance(value, (ast.Tuple, ast.List)) else ():
        if isinstance(one, ast.Constant) and one.value not in hookspecs.HOOKS:
            yield Problem(file, one.lineno, "hook", f"{attribute} names {one.value!r}, and there is no such hook",
                          nearest(str(one.value), hookspecs.HOOKS))  # fmt: skip


def _mutates(node: ast.ClassDef) -> bool:
    return assigned(node, "mutates") is True or any(
        isinstance(one, (ast.Assign, ast.AnnAssign)) and "mutating" in ast.dump(one) for one in node.body
    )


def _hook(file: str, node: ast.FunctionDef, *, may_return: bool) -> Iterator[Problem]:
    hook = node.name
    if hook not in hookspecs.HOOKS:
        yield Problem(file, node.lineno, "hook", f"there is no hook {hook!r}", nearest(hook, hookspecs.HOOKS))
        return
    yield from _wrappers(file, hook, node)
    yield from _arguments(file, hook, node, list(inspect.signature(getattr(hookspecs, hook)).parameters))
    if hook not in ("select", "configure") and not may_return:
        yield from _returns(file, hook, node)
        yield from _changes(file, hook, node)


def _daemon_hook(file: str, node: ast.FunctionDef) -> Iterator[Problem]:
    if node.name not in _DAEMON_HOOKS:
        yield Problem(
            file,
            node.lineno,
            "hook",
            f"there is no hook {node.name!r} in the daemon",
            nearest(node.name, _DAEMON_HOOKS),
        )
        return
    yield from _wrappers(file, node.name, node)
    yield from _arguments(file, node.name, node, list(inspect.signature(getattr(daemon_hooks, node.name)).parameters))


def _wrappers(file: str, hook: str, node: ast.FunctionDef) -> Iterator[Problem]:
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and {"wrapper", "hookwrapper"} & {one.arg for one in decorator.keywords}:
            yield Problem(
                file, node.lineno, "wrapper", f"{hook} is a hook wrapper, which is refused", "write @hookimpl alone"
            )


def _arguments(file: str, hook: str, node: ast.FunctionDef, allowed: Sequence[str]) -> Iterator[Problem]:
    given = node.args
    names = [*given.posonlyargs, *given.args]
    if not names or names[0].arg in allowed:
        yield Problem(file, node.lineno, "argument", f"{hook} has no self", "hooks are plain methods: write self first")
        return
    if hook in ALWAYS and len(names) < 2 and not given.vararg:
        yield Problem(file, node.lineno, "argument", f"{hook} takes no {allowed[0]!r}, which it is always given",
                      f"write def {hook}(self, {allowed[0]})")  # fmt: skip
    for star in (given.vararg, given.kwarg, *given.kwonlyargs):
        if star is not None:
            yield Problem(file, star.lineno, "argument", f"{hook} takes {star.arg!r} by other means than a plain name",
                          f"ask for what you need by name: {', '.join(allowed)}")  # fmt: skip
    for one in names[-len(given.defaults) :] if given.defaults else []:
        yield Problem(file, one.lineno, "default", f"{hook} gives {one.arg!r} a default, which hides the value",
                      f"write {one.arg} without a default")  # fmt: skip
    for one in names[1:]:
        if one.arg not in allowed:
            yield Problem(
                file, one.lineno, "argument", f"{hook} has no argument {one.arg!r}", nearest(one.arg, allowed)
            )


def _returns(file: str, hook: str, node: ast.FunctionDef) -> Iterator[Problem]:
    for one in walk_own(node):
        if isinstance(one, ast.Return) and one.value is not None:
            if isinstance(one.value, ast.Constant) and one.value.value is None:
                continue
            yield Problem(file, one.lineno, "return", f"{hook} returns something, and an observer may not",
                          "return nothing; or say mutates = True, and be enabled by name")  # fmt: skip


def _changes(file: str, hook: str, node: ast.FunctionDef) -> Iterator[Problem]:
    """Find operations in place on what the hook was given: `output.mul_(2)`, `output += 1`, `output[0] = 1`."""
    given = {one.arg for one in node.args.args[1:]} & hookspecs.TENSORS
    for one in walk_own(node):
        targets: list[ast.expr] = []
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and _IN_PLACE.search(one.func.attr):
            targets = [one.func.value]
        elif isinstance(one, ast.AugAssign):
            targets = [one.target]
        elif isinstance(one, ast.Assign):
            targets = [target for target in one.targets if isinstance(target, ast.Subscript)]
        for target in targets:
            if _root(target) in given:
                yield Problem(file, getattr(one, "lineno", node.lineno), "changed",
                              f"{hook} changes {_root(target)!r} in place, and an observer may not",
                              "work on a copy: what is passed is the training's own")  # fmt: skip


def _root(node: ast.expr) -> str:
    while isinstance(node, (ast.Subscript, ast.Attribute)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def walk_own(node: ast.AST) -> Iterator[ast.AST]:
    """Walk through a function without the functions defined in it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            yield child
            yield from walk_own(child)
