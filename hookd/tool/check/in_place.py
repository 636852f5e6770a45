"""Find observers that change what a hook gets: in-place operations on its arguments, or on what shares their memory.

What a function of the plugin does with an argument that it is handed is not followed.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from hookd.api import hookspecs
from hookd.tool.attach.sources import last_name
from hookd.tool.check.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

_IN_PLACE = re.compile(r"[^_]_$|^__i[a-z]+__$|^__setitem__$")
"""Names of methods and functions that change their argument: `mul_`, `zeros_`, `__imul__`."""
_VIEWS = frozenset(
    ("chunk", "contiguous", "detach", "diagonal", "expand", "flatten", "movedim", "narrow", "permute", "reshape", "select", "split",
     "squeeze", "swapaxes", "t", "tensors", "transpose", "unbind", "unflatten", "unsqueeze", "values", "view", "view_as")
)  # fmt: skip
"""Methods and functions whose result may share the memory of their argument."""
_MODULES = frozenset(("F", "Tensor", "functional", "init", "nn", "torch"))
"""Names of torch's modules, of which in-place functions change their first argument."""
_PLAIN = frozenset(("device", "dtype", "grad_fn", "is_cuda", "layout", "ndim", "requires_grad", "shape", "training"))
"""Attributes that are not tensors."""


def problems(file: str, hook: str, node: ast.FunctionDef, statements: Iterator[ast.AST]) -> Iterator[Problem]:
    """Yield the in-place operations of an observer's hook.

    Args:
        file: of the plugin.
        hook: its name.
        node: the hook.
        statements: its nodes, without those of functions inside it.
    """
    own = list(statements)
    shared = _Shared({argument.arg for argument in node.args.args[1:]} & hookspecs.TENSORS, own)
    for child in own:
        for target in _changed(child):
            if name := shared.root(target):
                yield Problem(file, getattr(child, "lineno", node.lineno), "changed", f"{hook} changes {name!r} in place, but an observer must not",
                              "work on a copy: the argument is the training's own object")  # fmt: skip


def _changed(node: ast.AST) -> Iterator[ast.expr]:
    """Yield what a statement or an expression would change, if it is a tensor."""
    if isinstance(node, ast.AugAssign):
        yield node.target
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, (ast.Subscript, ast.Attribute)):
                yield target.value
    elif isinstance(node, ast.Call):
        name = last_name(node.func)
        flags = {word.arg: word.value for word in node.keywords}
        if "out" in flags:
            yield flags["out"]
        is_set = isinstance(flags.get("inplace"), ast.Constant) and flags["inplace"].value is True  # type: ignore[attr-defined]
        if name in ("setattr", "delattr") or is_set or _IN_PLACE.search(name):
            if isinstance(node.func, ast.Name) or _first_name(node.func) in _MODULES:
                yield from node.args[:1]
            elif isinstance(node.func, ast.Attribute):  # a method, which changes its object
                yield node.func.value


def _first_name(node: ast.expr) -> str:
    """Return the name with which an expression such as `nn.init.zeros_` begins."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


class _Shared:
    """The names that may share the memory of a hook's arguments.

    Args:
        given: names of the arguments that are, or have, tensors.
        statements: of the hook.
    """

    def __init__(self, given: set[str], statements: list[ast.AST]) -> None:
        self._origins = {name: name for name in given}
        for _ in range(2):  # a loop may use what is assigned further down
            for node in statements:
                if isinstance(node, ast.Assign):
                    for target in node.targets:
                        self._assign(target, node.value)
                elif isinstance(node, (ast.For, ast.comprehension)):
                    self._assign(node.target, node.iter)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        names = [one.id for one in ast.walk(target) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)]
        if origin := self.root(value):
            self._origins.update(dict.fromkeys(names, origin))

    def root(self, node: ast.expr) -> str:
        """Return the argument whose memory the value of an expression may share; "" if there is none."""
        if isinstance(node, ast.Name):
            return self._origins.get(node.id, "")
        if isinstance(node, ast.Attribute):
            return "" if node.attr in _PLAIN else self.root(node.value)
        if isinstance(node, (ast.Subscript, ast.Starred)):
            return self.root(node.value)
        if isinstance(node, (ast.Tuple, ast.List)):
            return next(filter(None, map(self.root, node.elts)), "")
        if isinstance(node, ast.Call):
            return self._result(node)
        return ""

    def _result(self, call: ast.Call) -> str:
        name = last_name(call.func)
        if name == "torch" and isinstance(call.func, ast.Attribute):
            return ast.unparse(call)  # the module itself
        if name not in _VIEWS and not _IN_PLACE.search(name):
            return ""
        of = call.func.value if isinstance(call.func, ast.Attribute) else None
        return (self.root(of) if of is not None else "") or next(filter(None, map(self.root, call.args)), "")
