"""Nothing of ours asks the training's modules and optimizers for anything but through `hookd.api.passive`, which runs no code."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

import hookd
from hookd.tool.check.attributes import handed, is_theirs, touched

ROOT = Path(hookd.__file__).parent.parent
TOOL_SIDE = ("bundle/replay.py", "bundle/read.py")
"""What makes a module of a bundle, in a process of its own."""
FILES = [
    file
    for folder, pattern in (("hookd/api", "**/*.py"), ("hookd/target", "**/*.py"), ("plugins", "**/*.py"), ("examples/plugins", "*.py"))
    for file in sorted((ROOT / folder).glob(pattern))
    if not str(file).endswith(TOOL_SIDE) and "tests" not in file.parts
]  # fmt: skip
TREES = {str(file.relative_to(ROOT)): ast.parse(file.read_text()) for file in FILES}
KNOWN_BY_TYPE = {
    "plugins/hookd_capture/bundle/describe.py": ["module.extra_repr"],  # of torch's own classes alone
    "hookd/target/entry/patch.py": [
        "module._compiled_call_impl",
        "module._call_impl",
    ],  # the call itself, as torch's `__call__` makes it
}
TAKE_ANYTHING = {
    "id",
    "type",
    "ref",
    "Ref",
    "_call_visibly",
    "call_visibly",
    "visible_call",
    "append",
    "bare",
    "original",
    "plan",
}
"""What asks nothing: identities, references, containers, and the module's own call."""


@functools.cache
def functions():
    """Return all functions of ours by name, classes with their constructors."""
    found = {}
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                inits = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
                found.setdefault(node.name, []).extend(inits)
            elif isinstance(node, ast.FunctionDef):
                found.setdefault(node.name, []).append(node)
    return found


@pytest.mark.parametrize("name", [name for name in TREES if name != "hookd/api/passive.py"])
def test_nothing_is_asked(name):
    assert [text for _, text in touched(TREES[name]) if text not in KNOWN_BY_TYPE.get(name, ())] == []


@pytest.mark.parametrize("name", list(TREES))
def test_who_is_handed_one_says_so_and_is_looked_at_as_well(name):
    known = functions()
    unsaid = []
    for call, at in handed(TREES[name]):
        callee = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "?")
        parameters = [_parameter(one, at) for one in known.get(callee) or known.get(f"_{callee}") or ()]
        if callee not in TAKE_ANYTHING and not any(map(_says, parameters)):
            unsaid.append(f"{call.lineno}: {ast.unparse(call)}")
    assert unsaid == []


def _parameter(function, at):
    arguments = [one for one in function.args.args if one.arg not in ("self", "cls")]
    return arguments[at] if at < len(arguments) else None


def _says(parameter):
    return parameter is not None and (is_theirs(parameter.annotation) or ast.unparse(parameter.annotation) == "object")


ASKS = [
    "module.weight", "module.weight = 1", "del module.weight", "module[0]", "len(module)", "getattr(module, 'weight')",
    "hasattr(module, 'weight')", "isinstance(module, Linear)", "[one for one in module]", "module == other", "1 in module",
    "{module: 1}", "known[module]", "f'{module}'", "repr(module)", "print(*module)", "module and 1", "not module",
    "assert module", "1 if module else 2",
]  # fmt: skip


@pytest.mark.parametrize("code", ASKS)
@pytest.mark.parametrize(
    "head",
    [
        "def f(self, module: nn.Module):\n",
        "def f(self, module: nn.Module | None):\n",
        "def f(self, module: 'torch.nn.Module'):\n",
        "def f(self, module: Optimizer):\n",
        "def f(self, one):\n    module = one.torch()\n",
        "def f(self, one):\n    at, module = 1, one.torch()\n",
        "def f(self, one):\n    found = one.torch()\n    module = found if one else None\n",
        "def f(self, one):\n  for _, module in modules_in(one):\n",
        "def f(self, one):\n  for module in children_of(one).values():\n",
    ],
)
def test_what_asks_is_found(head, code):
    assert touched(ast.parse(f"{head}    {code}\n"))


def test_what_is_put_on_an_object_is_found_there():
    assert touched(
        ast.parse("class C:\n  def f(self, m: nn.Module):\n    self.m = m\n  def g(self):\n    self.m.weight")
    )


def test_what_comes_at_once_is_found():
    assert touched(ast.parse("def f(module):\n    return module.torch().weight"))


ASKS_NOT = [
    "module is None", "module is not other", "peek(module, 'weight')", "type(module)", "id(module)", "weakref.ref(module)",
    "return module", "known[id(module)] = module", "children_of(module)['a']", "(module, 1)", "issubclass(type(module), C)",
]  # fmt: skip


@pytest.mark.parametrize("code", ASKS_NOT)
def test_what_asks_nothing_is_let_be(code):
    assert touched(ast.parse(f"def f(module: nn.Module, other: nn.Module):\n    {code}\n")) == []


def test_hookds_own_record_of_a_module_may_be_asked():
    assert touched(ast.parse("def f(module: Module):\n    return module.name, module.torch()")) == []
