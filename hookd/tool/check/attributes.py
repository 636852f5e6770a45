"""Find code that reads attributes of the training's own objects.

Such a read may run the training's code, and change the training: a property, a parametrized weight, `__getattr__` or an
overridden method can do anything. An object is the training's if it is returned by `Module.torch()`, or annotated as a module
or optimizer of torch. A plugin may pass such an object on, compare it with `is`, or read it with the functions that hookd has
for that (`hookd.peek`).
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from hookd.tool.attach.sources import last_name
from hookd.tool.check.imports import parsed
from hookd.tool.check.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookd.tool.check.source import Subject

_THEIRS = re.compile(r"^(torch\.)?nn\.Module( \| None)?$|^(torch\.optim\.)?Optimizer( \| None)?$")
"""Annotations of the training's objects; a plain `Module` is hookd's."""
_ASKING = "getattr hasattr setattr delattr vars dir len repr str bool hash iter next list tuple set dict isinstance format".split()
"""Builtins that call methods of their argument."""
_INSIDE = ("children_of", "models", "modules_in")
"""Functions of hookd that return the training's modules, each with its name or record."""
_FIX = (
    "read it with hookd.peek(module, name), hookd.parameters_of(module) and the like, which run no code of the training"
)
_Function = (ast.FunctionDef, ast.Lambda)


def problems(subject: Subject) -> Iterator[Problem]:
    """Yield a warning for each read of an attribute of the training's objects."""
    for file in subject.files:
        for line, expression in touched(parsed(file)):
            message = f"{expression} may run the training's own code, and change the training"
            yield Problem(str(file), line, "attribute", message, _FIX, is_warning=True)


def touched(tree: ast.Module) -> list[tuple[int, str]]:
    """Return the expressions that may run code of the training's objects, with their lines."""
    return sorted({
        (operand.lineno, ast.unparse(node if isinstance(node, ast.expr) else operand))
        for node, names in _scoped_nodes(tree)
        for operand in _operands(node)
        if _is_theirs(operand, names)
    })  # fmt: skip


def handed(tree: ast.Module) -> list[tuple[ast.Call, int]]:
    """Return the calls with one of the training's objects as an argument, and its index.

    The called function must not read the object's attributes either.
    """
    calls = [(node, names) for node, names in _scoped_nodes(tree) if isinstance(node, ast.Call)]
    return [(node, at) for node, names in calls for at, argument in enumerate(node.args) if _is_theirs(argument, names)]


def is_theirs(annotation: ast.expr | None) -> bool:
    """Whether an annotation stands for one of the training's objects."""
    return annotation is not None and _THEIRS.match(_text(annotation)) is not None


def _scoped_nodes(tree: ast.Module) -> Iterator[tuple[ast.AST, set[str]]]:
    """Yield each node with the names of the training's objects in its scope."""
    attributes = {
        ast.unparse(target)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for target in _assigned_attributes(function, _own_names(function))
    }
    yield from _in_function(tree, attributes)


def _in_function(node: ast.AST, theirs: set[str]) -> Iterator[tuple[ast.AST, set[str]]]:
    """Yield the nodes of a function and of nested ones, which see its names."""
    names = theirs | _own_names(node)
    for child in _own_nodes(node):
        if isinstance(child, _Function):
            yield from _in_function(child, names - {arg.arg for arg in _arguments(child)})
        else:
            yield child, names


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of nested ones."""
    pending = list(ast.iter_child_nodes(node))
    while pending:
        child = pending.pop()
        yield child
        if not isinstance(child, _Function):
            pending += ast.iter_child_nodes(child)


def _own_names(node: ast.AST) -> set[str]:
    """Return the names that a function has for the training's objects."""
    names = {arg.arg for arg in _arguments(node) if is_theirs(arg.annotation)}
    before = -1
    while before != len(names):  # a name may be assigned to another one
        before = len(names)
        for child in _own_nodes(node):
            names |= _bound(child, names)
    return names


def _arguments(node: ast.AST) -> list[ast.arg]:
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs] if isinstance(node, _Function) else []


def _text(annotation: ast.expr) -> str:
    text = annotation.value if isinstance(annotation, ast.Constant) else ast.unparse(annotation)
    return re.sub(r"^Optional\[(.*)\]$", r"\1", str(text))


def _bound(node: ast.AST, names: set[str]) -> set[str]:
    """Return the names that a node binds to one of the training's objects.

    Args:
        node: of a function.
        names: those already known.
    """
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return {
            target.id
            for outer in targets
            for target, value in _pairs(outer, node.value)
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
    """Whether iterating over this yields modules: `modules_in(…)`, `children_of(…).items()` or `.values()`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("items", "values"):
        node = node.func.value
    return isinstance(node, ast.Call) and last_name(node.func) in _INSIDE


def _assigned_attributes(function: ast.FunctionDef, names: set[str]) -> Iterator[ast.Attribute]:
    """Yield attributes such as `self.model` that a function assigns the training's objects to."""
    for node in _own_nodes(function):
        if isinstance(node, ast.Assign):
            for target, value in (pair for outer in node.targets for pair in _pairs(outer, node.value)):
                if isinstance(target, ast.Attribute) and _is_theirs(value, names):
                    yield target


def _is_theirs(node: ast.expr, names: set[str]) -> bool:
    """Whether an expression is one of the training's objects.

    That is a known name, a call of `.torch()`, an item of `children_of(…)`, or a choice of two such expressions.
    """
    if isinstance(node, ast.IfExp):
        return _is_theirs(node.body, names) or _is_theirs(node.orelse, names)
    if isinstance(node, ast.NamedExpr):
        return _is_theirs(node.value, names)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr == "torch" and not node.args
    if isinstance(node, ast.Subscript):
        return isinstance(node.value, ast.Call) and last_name(node.value.func) == "children_of"
    return isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node) in names


def _operands(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the operands whose own code a node may run.

    That is: attribute access, hashing, iteration, comparison, and truth value.
    """
    if isinstance(node, (ast.Attribute, ast.Subscript, ast.Starred, ast.FormattedValue)):
        yield node.value
    if isinstance(node, ast.Subscript):  # a key is hashed
        yield node.slice
    if isinstance(node, ast.Dict):
        yield from filter(None, node.keys)
    if isinstance(node, ast.Set):
        yield from node.elts
    if isinstance(node, (ast.For, ast.comprehension)):
        yield node.iter
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _ASKING:
        yield from node.args
    if isinstance(node, ast.Compare) and not all(isinstance(operator, (ast.Is, ast.IsNot)) for operator in node.ops):
        yield from (node.left, *node.comparators)
    if isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
        yield node.test
    if isinstance(node, ast.BoolOp):
        yield from node.values
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    if isinstance(node, ast.comprehension):
        yield from node.ifs
