"""Find calls that hooks must not make.

A hot hook must not wait for a device, a disk, a lock, a network or another process. No hook may wait for other ranks, or draw
random numbers from the generators of the training.
"""

from __future__ import annotations

import ast
import functools
import re
from typing import TYPE_CHECKING

from hookd.api import hookspecs
from hookd.tool.check.imports import parsed
from hookd.tool.check.problem import Problem
from hookd.tool.check.signatures import walk_own
from hookd.tool.check.source import dotted, hooks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hookd.tool.check.source import Subject

    _Function = tuple[Path, ast.FunctionDef]

ALLOWED = "hookd: may block"
"""A comment with this text allows the call on its line."""
_BACKGROUND = "pass the work to context.aside(…), which runs it in a thread of hookd"
_DEVICE = "read it with context.later([tensor], then), or use context.summary(tensor, then)"
_RULES = (
    (r".*\.(item|tolist|numpy|cpu|synchronize)$", "blocking", "waits for the device", _DEVICE),
    (r"(time\.)?sleep$", "blocking", "makes the training wait", "remove it; hooks are called again automatically"),
    (r"(open|io\.open|os\.open|.*\.(open|read_text|write_text|read_bytes|write_bytes))$", "blocking", "waits for a disk", _BACKGROUND),
    (r"(print|input)$", "blocking", "writes to the output of the training", "use context.log(…), or a metric"),
    (r"(logging|log|logger|_log|_logger|LOG|LOGGER)\.(debug|info|warning|error|exception|critical|log)$", "blocking",
     "takes a lock and writes", "use context.log(…), or a metric"),
    (r".*\.acquire$", "blocking", "waits for a lock", "use a single thread, or a metric: metrics take no lock"),
    (r"(requests|httpx|urllib\.request|socket|subprocess|shutil|http\.client)\..+$", "blocking", "waits for I/O or a process", _BACKGROUND),
    (r"(urlopen|Popen|check_output|check_call)$", "blocking", "waits for I/O or a process", _BACKGROUND),
    (r"torch\.distributed\.(.*\.)?(all_|barrier|monitored_barrier|broadcast|gather|i?recv|i?send|reduce|scatter|batch_i)\w*$",
     "ranks", "waits for ranks that may not be in this hook", "publish each rank's own value: the daemon sees all ranks"),
    (r".*\.(wait|result|join)$", "blocking", "waits for another thread or process", _BACKGROUND),
    (r"(os\.system|torch\.save)$", "blocking", "waits for I/O or a process", _BACKGROUND),
    (r"(random|np\.random|numpy\.random)\..+$", "random", "draws random numbers that the training would have drawn",
     "create a separate generator in configure: random.Random(0)"),
    (r"torch\.(rand|randn|randint|randperm|bernoulli|multinomial|normal|rand_like|randn_like|manual_seed)$", "random",
     "draws random numbers that the training would have drawn", "pass generator= with a separate torch.Generator"),
)  # fmt: skip
_MINE = re.compile(r"random\.(Random|SystemRandom)$|(np|numpy)\.random\.(default_rng|Generator|RandomState)$")


def problems(subject: Subject) -> Iterator[Problem]:
    """Yield the forbidden calls in hooks, and in the functions and methods that these call."""
    reach = _Reach(subject)
    reported: set[tuple[str, int]] = set()
    for path, part in subject.parts:
        for hook in hooks(part):
            for file, node in reach.of(path, hook):
                lines = file.read_text(errors="replace").splitlines()
                for problem in _calls(file, hook.name, node):
                    key = problem.file, problem.line
                    if problem.rule == "blocking" and hook.name not in hookspecs.HOT:
                        continue
                    if key not in reported and ALLOWED not in "".join(
                        lines[problem.line - 1 : _end(node, problem.line)]
                    ):
                        reported.add(key)
                        yield problem


def _end(function: ast.FunctionDef, line: int) -> int:
    """Return the last line of the statement at a line: the comment may be there."""
    simple = (node for node in walk_own(function) if isinstance(node, ast.stmt) and not hasattr(node, "body"))
    return min(
        (node.end_lineno or line for node in simple if node.lineno <= line <= (node.end_lineno or 0)), default=line
    )


class _Reach:
    """Finds the methods and functions of a plugin that a hook calls by name."""

    def __init__(self, subject: Subject) -> None:
        self._methods: dict[str, _Function] = {}
        self._functions: dict[tuple[Path, str], _Function] = {}
        for path, part in subject.parts:
            for node in part.body:
                if isinstance(node, ast.FunctionDef):
                    self._methods.setdefault(node.name, (path, node))
            for node in parsed(path).body:
                if isinstance(node, ast.FunctionDef):
                    self._functions[path, node.name] = path, node

    def of(self, path: Path, hook: ast.FunctionDef) -> Iterator[_Function]:
        """Yield a hook and all that it calls, directly or indirectly, with their files."""
        # A function passed as a value (to `then` or `aside`) is not called in the hook, so it may block.
        pending: list[_Function] = [(path, hook)]
        seen = {id(hook)}
        while pending:
            file, node = pending.pop()
            yield file, node
            for call in walk_own(node):
                name = dotted(call.func) if isinstance(call, ast.Call) else ""
                is_mine = name.startswith("self.")
                called = self._methods.get(name[5:]) if is_mine else self._functions.get((file, name))
                if called is not None and id(called[1]) not in seen:
                    seen.add(id(called[1]))
                    pending.append(called)


@functools.cache
def _imported(file: Path) -> dict[str, str]:
    """Return the full names of a file's imports.

    After `from time import sleep as nap`, `nap` is `time.sleep`.
    """
    full_names = {}
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            full_names.update({alias.asname: alias.name for alias in node.names if alias.asname})
        elif isinstance(node, ast.ImportFrom) and not node.level:
            full_names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return full_names


def _full(name: str, file: Path) -> str:
    first, dot, rest = name.partition(".")
    return _imported(file).get(first, first) + dot + rest


def _is_fine(full: str, call: ast.Call) -> bool:
    """Whether a call that matches a rule is allowed.

    It may use or create a generator of the plugin, or join texts or paths.
    """
    has_own = full.startswith("torch.") and any(keyword.arg == "generator" for keyword in call.keywords)
    return has_own or _MINE.match(full) is not None or (full.endswith(".join") and bool(call.args))


def _calls(path: Path, hook: str, node: ast.FunctionDef) -> Iterator[Problem]:
    """Yield a problem for each forbidden call, and for each `with` on a lock."""
    file = str(path)
    where = hook if node.name == hook else f"{node.name}, which {hook} calls,"
    for child in walk_own(node):
        if isinstance(child, ast.Call):
            name = dotted(child.func)
            full = _full(name, path)
            for pattern, rule, why, fix in _RULES:
                if re.match(pattern, full) and not _is_fine(full, child):
                    yield Problem(file, child.lineno, rule, f"{where} calls {name.lstrip('.')}(), which {why}", fix)
                    break
        if isinstance(child, ast.With):
            for item in child.items:
                if "lock" in dotted(item.context_expr).rpartition(".")[2].lower():
                    name = dotted(item.context_expr)
                    yield Problem(file, child.lineno, "blocking", f"{where} enters {name}, and may wait for it",
                                  "use a single thread, or a metric: metrics take no lock")  # fmt: skip
