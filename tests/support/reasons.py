"""The reasons that hookd's errors can have, read from its sources: the words of `--json`, and what stands beside them."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from typing import TYPE_CHECKING

from hookd import errors
from tests.support.environment import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Iterator

_POSITIONAL = {"_refusal": 1, "RefusalError": 1}
"""What makes a refusal before hookd.errors is there (hookd/target/boot/stub.py, loader.py): the place of the reason."""
_INNER = {"_TooLateError", "_RestlessError", "BundleError", "CannotCompareError"}
"""Kinds of our errors that a module has for itself."""


@functools.cache
def reasons() -> dict[str, list[str]]:
    """Return each reason with the messages that come with it, as far as they stand beside it; what varies is an `…`."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in (one for top in ("hookd", "plugins") for one in sorted((REPOSITORY / top).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            for reason, message in _of(node):
                found[reason].append(message)
    return dict(found)


def _of(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func).rpartition(".")[2]
        if name in _POSITIONAL:
            given = node.args[_POSITIONAL[name] : _POSITIONAL[name] + 1]
            yield from ((one, _message(node.args[-1])) for value in given for one in _words(value))
        elif name == "kind" or name in _INNER or hasattr(errors, name):
            given = [keyword.value for keyword in node.keywords if keyword.arg == "reason"]
            yield from ((one, _message(node.args[0])) for value in given for one in _words(value))
            of_class = getattr(getattr(errors, name, None), "reason", "")
            if of_class and node.args and not given:
                yield of_class, _message(node.args[0])
    elif isinstance(node, ast.ClassDef):
        yield from ((one, "") for value in _assigned(node.body, "reason") for one in _words(value))
    elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith("['reason']"):
        yield from ((one, "") for one in _words(node.value))
    elif isinstance(node, ast.Dict) and {"ok", "error"} <= set(map(_word, node.keys)):
        pairs = zip(map(_word, node.keys), node.values, strict=True)
        yield from ((one, "") for key, value in pairs if key == "reason" for one in _words(value))


def _assigned(body: list[ast.stmt], name: str) -> Iterator[ast.expr]:
    for one in body:
        if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == name:
            yield one.value


def _words(value: ast.expr) -> list[str]:
    """Return the words that an expression can evaluate to, none if they are computed."""
    if isinstance(value, ast.IfExp):
        return _words(value.body) + _words(value.orelse)
    return [_word(value)] if _word(value) else []


def _word(node: ast.expr | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _message(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(_word(part) or "…" for part in node.values)
    if isinstance(node, ast.Constant):
        return str(node.value)
    return " ".join(_message(one) for one in ast.walk(node) if isinstance(one, (ast.JoinedStr, ast.Constant)))
