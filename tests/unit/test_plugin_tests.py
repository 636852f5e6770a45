"""The tests of the built-in plugins use of hookd what every author of a plugin has, and nothing beside it."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import pytest

import hookd
from tests.support.environment import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TESTS = sorted((REPOSITORY / "tests" / "plugins").glob("*.py"))
PUBLIC = ("hookd", "hookd.testing", "hookd.tool.check")
"""What docs/plugins.md and docs/testing.md tell of, and what `hookd plugin check` does (for the examples)."""
SUPPORT = tuple(
    f"tests.support.{name}"
    for name in (
        "bundles",
        "clipped",
        "clock",
        "cuda",
        "documents",
        "environment",
        "layered",
        "processes",
        "simulated_device",
    )
)
"""What reaches nothing else of hookd either."""
OF_TORCH = {
    "_BaseDataLoaderIter", "_C", "_amp_update_scale_", "_forward_hooks", "_get_mkldnn_enabled", "_set_mkldnn_enabled",
    "_set_params_and_buffers_to_ignore_for_model",
}  # fmt: skip
"""Private names that are torch's."""


def private(source: str) -> Iterator[str]:
    """Yield uses of hookd in a source that are not public: imports, texts that name a module, names with an underscore."""
    for node in ast.walk(ast.parse(source)):
        for found in (*_modules(node), *_names(node)):
            yield f"line {node.lineno}: {found}"


def _modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        named = [one.name for one in node.names]
    elif isinstance(node, ast.ImportFrom):
        named = [node.module or "."]
        if node.module in ("hookd", "tests", "tests.support"):  # what is imported may be a module
            named = [f"{node.module}.{one.name}" for one in node.names if one.name not in hookd.__all__]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        named = [node.value] if node.value.startswith(("hookd.", "tests.")) else []  # of what is to be replaced
    else:
        return []
    return [one for one in named if one.split(".")[0] in ("", "hookd", "tests") and not _is_public(one)]


def _is_public(module: str) -> bool:
    return module in (*PUBLIC, *SUPPORT) or module.startswith("hookd.tool.check.")


def _names(node: ast.AST) -> list[str]:
    """Return the attribute that is asked for, by a dot or by a text, where it is not everybody's."""
    if isinstance(node, ast.Attribute):
        base, name = node.value, node.attr
    elif isinstance(node, ast.Call) and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
        base, name = node.args[0], str(node.args[1].value)  # getattr(it, "name"), monkeypatch.setattr(it, "name", ...)
    else:
        return []
    of = base.id if isinstance(base, ast.Name) else ""
    if of == "hookd":
        return [] if name in (*hookd.__all__, "testing", "check") else [f"hookd.{name}"]
    is_private = name.startswith("_") and not name.endswith("__") and name not in OF_TORCH
    return [f"{of}.{name}"] if is_private and of not in ("self", "cls") else []


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_a_test_of_a_plugin_uses_what_is_public(path: Path) -> None:
    assert list(private(path.read_text("utf-8"))) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from hookd.target.events import batching", "hookd.target.events"),
        ("from hookd import target", "hookd.target"),
        ("import hookd.tool.attach.change", "hookd.tool.attach.change"),
        ("import hookd\nhookd.target.events.batching", "hookd.target"),
        ("from tests.support.agent import running", "tests.support.agent"),
        ("from tests.support import agent", "tests.support.agent"),
        ("from . import conftest", "."),
        ("monkeypatch.setattr('hookd.target.events.batching.KEPT', 0)", "hookd.target.events.batching.KEPT"),
        ("monkeypatch.setattr(hook, '_parts', None)", "hook._parts"),
        ("getattr(hook, '_parts')", "hook._parts"),
        ("hook._parts", "hook._parts"),
        ("hook.context('nan')._host", "._host"),
    ],
)
def test_what_is_not_public_is_found(source: str, found: str) -> None:
    assert [one.partition(": ")[2] for one in private(source)][:1] == [found]


@pytest.mark.parametrize("module", SUPPORT)
def test_what_supports_them_reaches_no_hookd(module: str) -> None:
    tree = ast.parse((REPOSITORY / module.replace(".", "/")).with_suffix(".py").read_text("utf-8"))
    assert not [
        one for node in ast.walk(tree) for one in _modules(node) if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
