"""Whether a plugin can travel: what it imports, how its module is called, and its entry point."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from hookd.api import is_name
from hookd.check.problem import Problem
from hookd.check.source import parsed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookd.check.source import Subject


def problems(subject: Subject) -> Iterator[Problem]:
    """Give what would keep a plugin from being found or imported in a target."""
    file, line = str(subject.file), subject.tree.lineno
    if subject.name and not is_name(subject.name):
        yield Problem(file, line, "name", f"{subject.name!r} cannot be a plugin's name",
                      "use a lower-case word that no core metric begins with")  # fmt: skip
    top = subject.module.partition(".")[0]
    if not top.startswith("hookd"):
        yield Problem(file, 1, "name", f"the module {top!r} may be one that a training has as well",
                      f"call it hookd_{top}", is_warning=True)  # fmt: skip
    for path in subject.files:
        for node in ast.walk(parsed(path)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            names += [one.name for one in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                if re.match(r"hookd\.", name):
                    yield Problem(str(path), getattr(node, "lineno", 0), "import", f"{name} is no public API of hookd",
                                  "import from hookd alone")  # fmt: skip
