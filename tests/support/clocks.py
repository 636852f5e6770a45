"""Find real clocks in tests: sleeps, comparisons of clock readings, short timeouts. Reads source, runs nothing."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TypeGuard

CLOCKS = {
    f"time.{name}{unit}"
    for name in ("monotonic", "perf_counter", "time", "process_time", "thread_time")
    for unit in ("", "_ns")
}
SLEEPS = {"time.sleep", "asyncio.sleep"}
ARITHMETIC = set("abs all any enumerate float int list max min reversed round set sorted sum tuple zip".split())
"""Functions whose result derives from their arguments; any other call may return something else."""
ADDS = {"append", "appendleft", "extend", "insert", "setdefault"}
WAITS = {"ask": 2, "expect": None, "finish": 0, "join": 0, "result": 0, "wait": 0, "wait_until": 1}
"""Functions that take a timeout as `timeout_s`, and at which position; None: by name only."""
SUSPICIOUS = re.compile(
    r"sleep|monotonic|perf_counter|(process|thread)_time|\btime\.time|from time|timeout|wait_until\(|"
    r"\.(ask|finish|join|result|wait)\("
)

SHORTEST_S = 60.0
"""A shorter timeout is too short: it may pass on a busy machine although nothing is wrong."""
SLEEP, CLOCK, SHORT = "sleep", "clock", "short timeout"


class Finding(NamedTuple):
    """A use of a real clock.

    Attributes:
        kind: SLEEP, CLOCK or SHORT.
        line: its line number.
        function: the function around it, with its class, as in `TestA.test_b`; "" at module level.
    """

    kind: str
    line: int
    function: str


def findings(source: str) -> list[Finding]:
    """Return every use of a real clock in the source of a module, by line."""
    if not SUSPICIOUS.search(source):
        return []
    return sorted(_Module(ast.parse(source)).findings(), key=lambda found: found.line)


def _units(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, list[ast.AST]]]:
    """Yield each outermost function, by its name, and together all other statements of a module or class."""
    others: list[ast.AST] = []
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, [node]
        elif isinstance(node, ast.ClassDef):
            yield from _units(node.body, f"{prefix}{node.name}.")
        else:
            others.append(node)
    yield prefix.rstrip("."), others


class _Module:
    """The names of a module, and which of them hold a clock's values.

    Names are distinguished by the outermost function that binds them, not by nested scope or by order.
    """

    def __init__(self, tree: ast.Module) -> None:
        self._units = [(name, [node for top in tops for node in ast.walk(top)]) for name, tops in _units(tree.body)]
        self._modules: dict[str, str] = {}  # from the name under which each is imported to its own
        self._functions: dict[str, str] = {}
        self._numbers: dict[str, float] = {}  # by the name of a constant of the module
        # By unit ("" for the module's own) and name: values of a clock; and functions that return one, as `name()`.
        self._tainted: set[tuple[str, str]] = set()
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                names = (target.id for target in node.targets if isinstance(target, ast.Name))
                self._numbers.update(dict.fromkeys(names, node.value.value))
        calls = []
        for _, nodes in self._units:
            for node in nodes:
                self._read_import(node)
            calls += [node for node in nodes if isinstance(node, ast.Call)]
        self._reads_clocks = any(self._called(call.func) in CLOCKS for call in calls)
        if self._reads_clocks:
            self._bound = {unit: {name for node in nodes for name in _binds(node)} for unit, nodes in self._units}
            self._spread_all()

    def _spread_all(self) -> None:
        before = -1
        while len(self._tainted) > before:
            before = len(self._tainted)
            for unit, nodes in self._units:
                self._spread(unit, nodes)

    def _read_import(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            self._modules.update({alias.asname or alias.name: alias.name for alias in node.names})
        elif isinstance(node, ast.ImportFrom):
            self._functions.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})

    def _called(self, node: ast.expr) -> str:
        """Return the qualified name of an imported function, or ""."""
        if isinstance(node, ast.Name):
            return self._functions.get(node.id, "")
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in self._modules:
            return f"{self._modules[node.value.id]}.{node.attr}"
        return ""

    def _scope(self, unit: str, name: str) -> tuple[str, str]:
        return (unit if name in self._bound[unit] else "", name)

    def _is_tainted(self, unit: str, node: ast.AST | None) -> bool:
        """Return whether the value of an expression derives from a clock."""
        if node is None or isinstance(node, ast.Lambda):
            return False
        if isinstance(node, ast.Name):
            return self._scope(unit, node.id) in self._tainted
        if isinstance(node, ast.Call):
            if self._called(node.func) in CLOCKS:
                return True
            if isinstance(node.func, ast.Name):
                takes = node.func.id in ARITHMETIC and any(self._is_tainted(unit, part) for part in node.args)
                return takes or (self._scope(unit, f"{node.func.id}()") in self._tainted)
            return self._is_tainted(unit, node.func)
        if _is_of_self(node):
            return ("", f"self.{node.attr}") in self._tainted
        return any(self._is_tainted(unit, part) for part in ast.iter_child_nodes(node))

    def _taint(self, unit: str, target: ast.AST) -> None:
        """Note that the target of an assignment, or the container of that target, holds the value of a clock."""
        if isinstance(target, ast.Tuple | ast.List):
            for part in target.elts:
                self._taint(unit, part)
        elif _is_of_self(target):
            self._tainted.add(("", f"self.{target.attr}"))
        elif isinstance(target, ast.Attribute | ast.Subscript | ast.Starred):
            self._taint(unit, target.value)
        elif isinstance(target, ast.Name):
            self._tainted.add(self._scope(unit, target.id))

    def _spread(self, unit: str, nodes: list[ast.AST]) -> None:
        for node in nodes:
            match node:
                case ast.Assign(targets=targets, value=value) if self._is_tainted(unit, value):
                    self._assign(unit, targets, value)
                case (
                    ast.AugAssign(target=target, value=value)
                    | ast.AnnAssign(target=target, value=value)
                    | ast.NamedExpr(target=target, value=value)
                ) if self._is_tainted(unit, value):
                    self._taint(unit, target)
                case ast.For(target=target, iter=iterated) | ast.comprehension(target=target, iter=iterated) if (
                    self._is_tainted(unit, iterated)
                ):
                    self._taint(unit, target)
                case ast.Call(func=ast.Attribute(value=container, attr=attr), args=args) if attr in ADDS:
                    is_own = isinstance(container, ast.Name) or _is_of_self(container)
                    if is_own and any(self._is_tainted(unit, part) for part in args):
                        self._taint(unit, container)
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    if any(self._is_tainted(unit, value) for value in _returned(node)):
                        self._tainted.add(self._result_of(unit, name))

    def _result_of(self, unit: str, name: str) -> tuple[str, str]:
        """Return the name under which a function's result is known: a method's is an attribute of `self`."""
        if unit.endswith(f".{name}"):
            return "", f"self.{name}"
        return ("", f"{name}()") if unit == name else self._scope(unit, f"{name}()")

    def _assign(self, unit: str, targets: list[ast.expr], value: ast.expr) -> None:
        for target in targets:
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
                for part, given in zip(target.elts, value.elts, strict=True):
                    if self._is_tainted(unit, given):
                        self._taint(unit, part)
            else:
                self._taint(unit, target)

    def findings(self) -> Iterator[Finding]:
        for unit, nodes in self._units:
            seen: set[int] = set()
            for node in nodes:
                if isinstance(node, ast.Call) and self._sleeps(node):
                    yield Finding(SLEEP, node.lineno, unit)
                if isinstance(node, ast.Call) and self._is_short(node):
                    yield Finding(SHORT, node.lineno, unit)
                for condition in _conditions(node) if self._reads_clocks else ():
                    if condition.lineno not in seen and self._is_tainted(unit, condition):
                        seen.add(condition.lineno)
                        yield Finding(CLOCK, condition.lineno, unit)

    def _sleeps(self, call: ast.Call) -> bool:
        called = self._called(call.func)
        is_zero = call.args and isinstance(call.args[0], ast.Constant) and call.args[0].value == 0
        return called in SLEEPS and not (called == "asyncio.sleep" and is_zero)

    def _is_short(self, call: ast.Call) -> bool:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        names = {"timeout", "timeout_s"} if name in WAITS else {"timeout"}
        position = WAITS.get(name)
        given = [keyword.value for keyword in call.keywords if keyword.arg in names]
        if position is not None and position < len(call.args):
            given.append(call.args[position])
        return any(number is not None and 0 < number < SHORTEST_S for number in map(self._number, given))

    def _number(self, node: ast.expr) -> float | None:
        value = node.value if isinstance(node, ast.Constant) else self._numbers.get(getattr(node, "id", ""))
        return value if isinstance(value, int | float) else None


def _is_of_self(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}


def _binds(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node of a function binds in it."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield f"{node.name}()"


def _returned(function: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions that a function returns or yields, without those of functions inside it."""
    inside = list(ast.iter_child_nodes(function))
    while inside:
        node = inside.pop()
        if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom) and node.value is not None:
            yield node.value
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inside.extend(ast.iter_child_nodes(node))


def _conditions(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions by whose truth a node decides."""
    if isinstance(node, ast.Assert | ast.If | ast.While | ast.IfExp):
        yield node.test
    elif isinstance(node, ast.comprehension):
        yield from node.ifs
    elif isinstance(node, ast.Compare):
        yield node
