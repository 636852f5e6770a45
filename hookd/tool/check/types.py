"""Check the annotations of a plugin's hooks with mypy, if it is installed.

A hook takes any subset of its arguments by name, and a Protocol cannot express that. Therefore mypy checks a generated file
that calls each hook as hookd does: with the arguments that the hook asks for, in the types of `hookd.api.hookspecs` or
`hookd.serving.hookspecs`:

    def forward(plugin: Widths, module: Module) -> None:
        result: None = plugin.forward(module=module)

mypy skips torch (`follow_imports = skip`), because checking it takes a minute: its types are Any here.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import hookd
from hookd.errors import HookdError
from hookd.tool.check.problem import Problem
from hookd.tool.check.signatures import specs
from hookd.tool.check.source import hooks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookd.tool.check.source import Subject

_PRELUDE = """# mypy: disable-error-code="func-returns-value"
from collections.abc import Collection, Sequence
from typing import Any
"""
_TYPES = {
    "target": """from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from hookd import Call, Context, Module, Plugin, Summary
""",
    "daemon": """from collections.abc import Mapping
import click
from hookd.serving import Metrics, Panel, Reading
""",
}
_CONFIG = """[mypy]
ignore_missing_imports = True
explicit_package_bases = True
namespace_packages = True
[mypy-torch.*]
follow_imports = skip
[mypy-hookd.*]
follow_imports = silent
"""
_LINE = re.compile(r"(.+?):(\d+): error: (.*)$")
TIMEOUT_S = 120


def is_possible() -> bool:
    """Whether mypy is installed in hookd's environment."""
    return importlib.util.find_spec("mypy") is not None


def problems(subject: Subject) -> list[Problem]:
    """Return mypy's errors in the plugin's files and in the generated calls.

    An error in a call has the line of its hook.

    Raises:
        HookdError: mypy took longer than TIMEOUT_S.
    """
    lines, homes = _calls(subject)
    with tempfile.TemporaryDirectory() as home:
        calls, config = Path(home, "hookd_calls_of_the_plugin.py"), Path(home, "mypy.ini")
        calls.write_text(_PRELUDE + _TYPES[subject.side] + "".join(lines))
        config.write_text(_CONFIG)
        printed = _mypy(subject, calls, config, home)
    return list(_found(printed, subject, homes))


def _calls(subject: Subject) -> tuple[list[str], dict[int, tuple[Path, int]]]:
    """Return the generated lines, and by line number the file and line of the hook."""
    lines = [f"from {subject.module} import {subject.class_name} as Checked\n"]
    homes: dict[int, tuple[Path, int]] = {}
    before = (_PRELUDE + _TYPES[subject.side]).count("\n")
    signatures = specs(subject)
    for path, hook in ((path, hook) for path, part in subject.parts for hook in hooks(part)):
        if hook.name in signatures:
            signature = signatures[hook.name]
            names = [argument.arg for argument in hook.args.args[1:] if argument.arg in signature.parameters]
            types = {name: str(signature.parameters[name].annotation) for name in names}
            types |= dict.fromkeys({"predecessor"} & types.keys(), "Checked")  # an instance of the plugin's own class
            typed = "".join(f", {name}: {kind}" for name, kind in types.items())
            passed = ", ".join(f"{name}={name}" for name in names)
            lines.append(f"def {hook.name}(plugin: Checked{typed}) -> None:\n")
            lines.append(f"    result: {signature.return_annotation} = plugin.{hook.name}({passed})\n")
            homes[before + len(lines) - 1] = homes[before + len(lines)] = path, hook.lineno
    return lines, homes


def _mypy(subject: Subject, calls: Path, config: Path, cwd: str) -> str:
    path = os.pathsep.join([str(subject.directory), str(Path(hookd.__file__).parent.parent)])
    words: list[str | Path] = [sys.executable, "-m", "mypy", "--config-file", config, "--no-error-summary", "--no-color-output",
             "--hide-error-context", "--no-pretty", "--show-absolute-path", "--cache-dir", _cache(), calls]  # fmt: skip
    environ = {**os.environ, "MYPYPATH": path}
    try:
        # In a separate directory: `-m` imports from the current one first, which may be the plugin's.
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=environ, cwd=cwd
        )
    except subprocess.TimeoutExpired as error:
        message = f"mypy has checked the types of {subject.name} for longer than {TIMEOUT_S:g} s"
        raise HookdError(message, hint="Run it again: mypy may continue from its cache.") from error
    return done.stdout + done.stderr


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "hookd", "mypy")


def _found(printed: str, subject: Subject, homes: dict[int, tuple[Path, int]]) -> Iterator[Problem]:
    mine = {str(file): file for file in subject.files}
    for line in printed.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        file, number, message = Path(match[1]).resolve(), int(match[2]), match[3]
        if file.name == "hookd_calls_of_the_plugin.py" and number in homes:
            home, at = homes[number]
            package = "api" if subject.side == "target" else "serving"
            yield Problem(str(home), at, "types", message, f"annotate it as hookd/{package}/hookspecs does")
        elif str(file) in mine:
            yield Problem(str(file), number, "types", message)
