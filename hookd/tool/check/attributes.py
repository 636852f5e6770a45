"""Who reads attributes of the training's own modules and optimizers, which may run code of theirs, and change the training.

A property, a parametrized weight, `__getattr__` or an overridden method can do anything. What comes from `Module.torch()`, or
is annotated as torch's, may be handed on, compared with `is`, or read through what `hookd` has for that (`hookd.peek`).
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from hookd.tool.check.imports import parsed
from hookd.tool.check.problem import Problem
from hookd.tool.check.source import last_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookd.tool.check.source import Subject

_THEIRS = re.compile(r"^(torch\.)?nn\.Module( \| None)?$|^(torch\.optim\.)?Optimizer( \| None)?$")
"""Annotations of what is the training's; `Module` alone is hookd's."""
_ASKING = "getattr hasattr setattr delattr vars dir len repr str bool hash iter next list tuple set dict isinstance format".split()
"""Builtins that ask the object itself."""
_INSIDE = ("children_of", "models", "modules_in")
"""What gives modules, beside other things."""
_FIX = "read it with hookd.peek(module, name), hookd.parameters_of(module) and the like, which run nothing"
_Function = (ast.FunctionDef, ast.Lambda)


def problems(subject: Subject) -> Iterator[Problem]:
    """Give a warning for each line of a plugin that reads an attribute of the training's own objects."""
    for file in subject.files:
        for line, what in touched(parsed(file)):
            message = f"{what}: that may run code of the training's own, and change it"
            yield Problem(str(file), line, "attribute", message, _FIX, is_warning=True)


def touched(tree: ast.Module) -> list[tuple[int, str]]:
    """Find where the code of a file asks the training's own objects for anything, by line, with the expression."""
    return sorted({
        (asked.lineno, ast.unparse(node if isinstance(node, ast.expr) else asked))
        for node, names in _seen(tree)
        for asked in _asked(node)
        if _is_theirs(asked, names)
    })  # fmt: skip


def handed(tree: ast.Module) -> list[tuple[ast.Call, int]]:
    """Find the calls that one of them is an argument of, with its place there: who takes it must not ask it either."""
    calls = [(node, names) for node, names in _seen(tree) if isinstance(node, ast.Call)]
    return [(node, at) for node, names in calls for at, one in enumerate(node.args) if _is_theirs(one, names)]


def is_theirs(annotation: ast.expr | None) -> bool:
    """Whether an annotation says that something is the training's."""
    return annotation is not None and _THEIRS.match(_text(annotation)) is not None


def _seen(tree: ast.Module) -> Iterator[tuple[ast.AST, set[str]]]:
    """Yield each node of a file with the names that stand for the training's objects there."""
    kept = {
        ast.unparse(target)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for target in _kept(function, _own_names(function))
    }
    yield from _in_function(tree, kept)


def _in_function(node: ast.AST, theirs: set[str]) -> Iterator[tuple[ast.AST, set[str]]]:
    """Look at a function, and at those inside of it, which see its names."""
    names = theirs | _own_names(node)
    for one in _own_nodes(node):
        if isinstance(one, _Function):
            yield from _in_function(one, names - {arg.arg for arg in _arguments(one)})
        else:
            yield one, names


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Give the nodes of a function, functions inside as a whole."""
    open_ = list(ast.iter_child_nodes(node))
    while open_:
        one = open_.pop()
        yield one
        if not isinstance(one, _Function):
            open_ += ast.iter_child_nodes(one)


def _own_names(node: ast.AST) -> set[str]:
    """Give the names that stand for the training's objects in a function."""
    names = {arg.arg for arg in _arguments(node) if is_theirs(arg.annotation)}
    before = -1
    while before != len(names):  # one may be given to another
        before = len(names)
        for one in _own_nodes(node):
            names |= _bound(one, names)
    return names


def _arguments(node: ast.AST) -> list[ast.arg]:
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs] if isinstance(node, _Function) else []


def _text(annotation: ast.expr) -> str:
    text = annotation.value if isinstance(annotation, ast.Constant) else ast.unparse(annotation)
    return re.sub(r"^Optional\[(.*)\]$", r"\1", str(text))


def _bound(node: ast.AST, names: set[str]) -> set[str]:
    """Give the names that a node binds to one of them."""
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return {
            target.id
            for whole in targets
            for target, value in _pairs(whole, node.value)
            if isinstance(target, ast.Name) and _is_theirs(value, names)
        }
    if isinstance(node, (ast.For, ast.comprehension)) and _gives_modules(node.iter):
        last = node.target.elts[-1] if isinstance(node.target, ast.Tuple) else node.target
        return {last.id} if isinstance(last, ast.Name) else set()
    return set()


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        return list(zip(target.elts, value.elts, strict=True))
    return [(target, value)]


def _gives_modules(node: ast.expr) -> bool:
    """Whether `for … in` that gives modules: `modules_in(…)`, `children_of(…).items()` or `.values()`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("items", "values"):
        node = node.func.value
    return isinstance(node, ast.Call) and last_name(node.func) in _INSIDE


def _kept(function: ast.FunctionDef, names: set[str]) -> Iterator[ast.Attribute]:
    """Give the attributes of `self` under which a function puts one of them."""
    for one in _own_nodes(function):
        if isinstance(one, ast.Assign):
            for target, value in (pair for whole in one.targets for pair in _pairs(whole, one.value)):
                if isinstance(target, ast.Attribute) and _is_theirs(value, names):
                    yield target


def _is_theirs(node: ast.expr, names: set[str]) -> bool:
    """Whether an expression is one of the training's objects: a name, what `.torch()` gives, or either of two such."""
    if isinstance(node, ast.IfExp):
        return _is_theirs(node.body, names) or _is_theirs(node.orelse, names)
    if isinstance(node, ast.NamedExpr):
        return _is_theirs(node.value, names)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr == "torch" and not node.args
    if isinstance(node, ast.Subscript):
        return isinstance(node.value, ast.Call) and last_name(node.value.func) == "children_of"
    return isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node) in names


def _asked(node: ast.AST) -> Iterator[ast.expr]:
    """Give the expressions of which a node asks something that runs their code."""
    if isinstance(node, (ast.Attribute, ast.Subscript, ast.Starred, ast.FormattedValue)):
        yield node.value
    if isinstance(node, ast.Subscript):  # as a key it would be hashed
        yield node.slice
    if isinstance(node, ast.Dict):
        yield from filter(None, node.keys)
    if isinstance(node, ast.Set):
        yield from node.elts
    if isinstance(node, (ast.For, ast.comprehension)):
        yield node.iter
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _ASKING:
        yield from node.args
    if isinstance(node, ast.Compare) and not all(isinstance(one, (ast.Is, ast.IsNot)) for one in node.ops):
        yield from (node.left, *node.comparators)
    if isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
        yield node.test
    if isinstance(node, ast.BoolOp):
        yield from node.values
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    if isinstance(node, ast.comprehension):
        yield from node.ifs
