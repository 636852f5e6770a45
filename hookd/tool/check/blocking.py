"""What a hot hook must not do: wait for a device, a disk, a lock, a network or a rank; and no hook: draw random numbers."""

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
"""A comment on the line that says that its author knows."""
_ASIDE = "give the work to context.aside(…), which does it in a thread of hookd's own"
_DEVICE = "read it with context.later([tensor], then), or use context.summary(tensor, then)"
_RULES = (
    (r".*\.(item|tolist|numpy|cpu|synchronize)$", "blocking", "waits for the device", _DEVICE),
    (r"(time\.)?sleep$", "blocking", "makes the training wait", "take it out; hooks come again by themselves"),
    (r"(open|io\.open|os\.open|.*\.(open|read_text|write_text|read_bytes|write_bytes))$", "blocking", "waits for a disk", _ASIDE),
    (r"(print|input)$", "blocking", "writes into the training's own output", "use context.log(…), or a metric"),
    (r"(logging|log|logger|_log|_logger|LOG|LOGGER)\.(debug|info|warning|error|exception|critical|log)$", "blocking",
     "takes a lock and writes", "use context.log(…), or a metric"),
    (r".*\.acquire$", "blocking", "waits for a lock", "keep to one thread, or use a metric: counting takes no lock"),
    (r"(requests|httpx|urllib\.request|socket|subprocess|shutil|http\.client)\..+$", "blocking", "waits for the outside", _ASIDE),
    (r"(urlopen|Popen|check_output|check_call)$", "blocking", "waits for the outside", _ASIDE),
    (r"torch\.distributed\.(.*\.)?(all_|barrier|monitored_barrier|broadcast|gather|i?recv|i?send|reduce|scatter|batch_i)\w*$",
     "ranks", "waits for ranks that are not in this hook now", "tell each rank's own value: the daemon has them all"),
    (r".*\.(wait|result|join)$", "blocking", "waits for another thread or process", _ASIDE),
    (r"(os\.system|torch\.save)$", "blocking", "waits for the outside", _ASIDE),
    (r"(random|np\.random|numpy\.random)\..+$", "random", "draws random numbers that the training would have drawn",
     "make a generator of your own in configure: random.Random(0)"),
    (r"torch\.(rand|randn|randint|randperm|bernoulli|multinomial|normal|rand_like|randn_like|manual_seed)$", "random",
     "draws random numbers that the training would have drawn", "pass generator=, a torch.Generator of your own"),
)  # fmt: skip
_MINE = re.compile(r"random\.(Random|SystemRandom)$|(np|numpy)\.random\.(default_rng|Generator|RandomState)$")


def problems(subject: Subject) -> Iterator[Problem]:
    """Give the calls that block in a hot hook, or draw random numbers in any, or in what it calls of its class and module."""
    reach = _Reach(subject)
    told: set[tuple[str, int]] = set()
    for path, part in subject.parts:
        for hook in hooks(part):
            for file, node in reach.of(path, hook):
                lines = file.read_text(errors="replace").splitlines()
                for problem in _calls(file, hook.name, node):
                    key = problem.file, problem.line
                    if problem.rule == "blocking" and hook.name not in hookspecs.HOT:
                        continue
                    if key not in told and ALLOWED not in "".join(lines[problem.line - 1 : _end(node, problem.line)]):
                        told.add(key)
                        yield problem


def _end(function: ast.FunctionDef, line: int) -> int:
    """Give the last line of the statement that a line belongs to: its comment may stand there."""
    simple = (one for one in walk_own(function) if isinstance(one, ast.stmt) and not hasattr(one, "body"))
    return min((one.end_lineno or line for one in simple if one.lineno <= line <= (one.end_lineno or 0)), default=line)


class _Reach:
    """What a hook calls by name, of its own class and of the module that it is in."""

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
        """Give a hook and what it calls; what it hands over as a value (`then`, `aside`) is called elsewhere."""
        open_: list[_Function] = [(path, hook)]
        seen = {id(hook)}
        while open_:
            file, node = open_.pop()
            yield file, node
            for call in walk_own(node):
                name = dotted(call.func) if isinstance(call, ast.Call) else ""
                is_mine = name.startswith("self.")
                called = self._methods.get(name[5:]) if is_mine else self._functions.get((file, name))
                if called is not None and id(called[1]) not in seen:
                    seen.add(id(called[1]))
                    open_.append(called)


@functools.cache
def _imported(file: Path) -> dict[str, str]:
    """Say what the names that a file imports stand for: `nap` for `time.sleep` after `from time import sleep as nap`."""
    found = {}
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            found.update({one.asname: one.name for one in node.names if one.asname})
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.update({one.asname or one.name: f"{node.module}.{one.name}" for one in node.names})
    return found


def _full(name: str, file: Path) -> str:
    first, dot, rest = name.partition(".")
    return _imported(file).get(first, first) + dot + rest


def _is_fine(full: str, call: ast.Call) -> bool:
    """Whether a call draws from a generator of the plugin's own, makes one, or joins texts or paths, not threads."""
    has_own = full.startswith("torch.") and any(one.arg == "generator" for one in call.keywords)
    return has_own or _MINE.match(full) is not None or (full.endswith(".join") and bool(call.args))


def _calls(path: Path, hook: str, node: ast.FunctionDef) -> Iterator[Problem]:
    """Give what a function calls that blocks."""
    file = str(path)
    where = hook if node.name == hook else f"{node.name}, which {hook} calls,"
    for one in walk_own(node):
        if isinstance(one, ast.Call):
            name = dotted(one.func)
            full = _full(name, path)
            for pattern, rule, why, fix in _RULES:
                if re.match(pattern, full) and not _is_fine(full, one):
                    yield Problem(file, one.lineno, rule, f"{where} calls {name.lstrip('.')}(), which {why}", fix)
                    break
        if isinstance(one, ast.With):
            for item in one.items:
                if "lock" in dotted(item.context_expr).rpartition(".")[2].lower():
                    name = dotted(item.context_expr)
                    yield Problem(file, one.lineno, "blocking", f"{where} holds {name}, and may wait for it",
                                  "keep to one thread, or use a metric: counting takes no lock")  # fmt: skip
