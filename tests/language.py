"""Check the language of docstrings, comments, messages and documents, as far as a machine can.

    python -m tests.language [PATH...]

Prints each finding as `file:line: text`. Exit status: 0 if there is none, else 1.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).resolve().parents[1]
PATHS = ("deploy", "docs", "examples", "hookd", "plugins", "tests", "CHANGELOG.md", "README.md")
"""The paths that are checked by default."""
GENERATED = ("docs/reference", "docs/benchmarks.md")

SUMMARY = re.compile(r"(?:Give|Gives|Tell|Say|Be|Do|Have|Let) ")
"""Beginnings that no docstring of a function may have: the usual verbs are Return, Raise, Yield, Write, ..."""
INVERTED = re.compile(r"(?:What|Who|Whose|Whom|That which|Of which) ")
"""Beginnings that no docstring may have: the subject comes first."""
NEGATED = re.compile(
    r"(?<!there )(?<!There )\b(?:is|are|was|were) no (?!longer\b|more\b|less\b|fewer\b|other\b|later\b|earlier\b|one\b)"
)
"""Negations with `is no` where English says `is not a`."""


class Finding(NamedTuple):
    """A text that breaks a rule, and where it is."""

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        """Return the finding as linters print it."""
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.text}"


def of_python(path: Path) -> Iterator[Finding]:
    """Yield the findings in the docstrings, strings and comments of a Python file."""
    source = path.read_text("utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node) or ""
            rule = SUMMARY if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else INVERTED
            if rule.match(docstring) or INVERTED.match(docstring):
                yield Finding(path, node.body[0].lineno, docstring.partition("\n")[0])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            for found in NEGATED.finditer(node.value):
                yield Finding(path, node.lineno + node.value.count("\n", 0, found.start()), _around(node.value, found))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and (found := NEGATED.search(token.string)):
            yield Finding(path, token.start[0], _around(token.string, found))


def of_document(path: Path) -> Iterator[Finding]:
    """Yield the findings in a document."""
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if found := NEGATED.search(line):
            yield Finding(path, number, _around(line, found))


def _around(text: str, found: re.Match[str]) -> str:
    return " ".join(text[max(0, found.start() - 40) : found.end() + 40].split())


def findings(paths: Iterable[Path]) -> Iterator[Finding]:
    """Yield the findings in all files at or below the paths, except generated files."""
    readers = {".py": of_python, ".md": of_document}
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix in readers and not str(file.relative_to(ROOT)).startswith(GENERATED):
                yield from readers[file.suffix](file)


def main(words: list[str]) -> int:
    """Print the findings, and return the exit status."""
    found = list(findings(Path(word).resolve() for word in words or (str(ROOT / name) for name in PATHS)))
    for one in found:
        print(one)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
