"""Every command in the documents: those in blocks, as a person would type them, and those named in a line of prose."""

from __future__ import annotations

import ast
import re
import shlex
import sys
from typing import TYPE_CHECKING, NamedTuple

from tests.support.documents import pages
from tests.support.environment import REPOSITORY

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROGRAMS = frozenset(
    """
    accelerate amtool apt-get cargo cat cd cp curl docker echo export grep hookd htpasswd install jq kill kubectl ln make mkdir
    mkdocs openssl pip podman promtool prometheus pytest python python3 sbatch scontrol sed sqlite3 srun sudo systemctl
    systemd-analyze tensorboard tmux torchrun
    """.split()
)
"""How a command begins; or it begins with a path, such as deploy/slurm/attach.sh."""
DATA = ("python", "toml", "ini", "yaml", "json", "text", "promql", "html", "css")
"""Languages of fenced blocks that hold no command."""
_INDENTED = re.compile(r"(?:^ {4,}\S.*\n(?:\s*\n(?= {4}))*)+", re.MULTILINE)
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"\s+#\s.*$|^#.*$")
_VALUES = {"N": "2", "S": "5"}


class Block(NamedTuple):
    """A block of a document: its declared language ("" for none), and its place."""

    page: str
    line: int
    language: str
    text: str


class Command(NamedTuple):
    """A command, without the comment behind it, and its place."""

    text: str
    where: str


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced and the indented blocks of a page."""
    text, name = page.read_text("utf-8"), str(page.relative_to(REPOSITORY))
    blank = text
    for found in _FENCED.finditer(text):
        yield Block(name, text.count("\n", 0, found.start()) + 1, found[1], found[2])
        blank = blank.replace(found[0], re.sub(r".", "", found[0]))  # this keeps the numbers of the lines
    for found in _INDENTED.finditer(blank):
        before = blank[: found.start()].rstrip("\n").rpartition("\n")[2]
        if blank[: found.start()].endswith("\n\n") or not re.match(r"- |\d+\. | {2}", before):
            whole = Block(name, blank.count("\n", 0, found.start()) + 1, "", found[0])
            yield from [whole] if kind(whole) else _parts(whole)


def _parts(block: Block) -> Iterator[Block]:
    """Yield the parts between blank lines, for a block that is not of one kind."""
    line = block.line
    for text in re.split(r"(\n\s*\n)", block.text):
        if text.strip():
            yield block._replace(line=line, text=text)
        line += text.count("\n")


def kind(block: Block) -> str:
    """Return the kind of a block: shell, data, or "" if it is unknown."""
    if block.language in DATA:
        return "data"
    lines = logical_lines(block)
    if any(line.startswith("$ ") for line in lines):
        return "shell"
    if lines and all(_is_command(line) for line in lines):
        return "shell"
    return "data" if _is_python(block.text) or _is_toml(block.text) else ""


def commands() -> list[Command]:
    """Return the commands of all documents; a command with options in brackets stands for one command with each of them."""
    found = []
    for block in (block for page in pages() for block in blocks(page) if kind(block) == "shell"):
        lines = logical_lines(block)
        if any(line.startswith("$ ") for line in lines):  # the others are its output
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        found += [Command(one, f"{block.page}:{block.line}") for line in lines for one in _each(line)]
    return found


def spoken() -> Iterator[Command]:
    """Yield the commands that a line of prose names: `hookd …` in backquotes."""
    for page in pages():
        text = _FENCED.sub("", page.read_text("utf-8"))
        for found in re.finditer(r"`(hookd [a-z][^`]*)`", re.sub(r"\s*\n\s*", " ", text)):
            yield Command(found[1].replace("\\|", "|"), str(page.relative_to(REPOSITORY)))


def logical_lines(block: Block) -> list[str]:
    """Return the lines without comments and indent; lines that end with a backslash are joined."""
    lines = re.sub(r"\\\n\s*", "", block.text).split("\n")
    plain = (_COMMENT.sub("", line.strip()) for line in lines)
    return [line.strip() for line in plain if line.strip()]


def _each(line: str) -> list[str]:
    options = re.findall(r" \[(-[^\]]+)\]", line)
    plain = re.sub(r" \[-[^\]]+\]", "", line)
    given = [" ".join(_VALUES.get(word, word) for word in option.split()) for option in options]
    return [plain, *(f"{plain} {option}" for option in given)]


def _is_command(line: str) -> bool:
    try:
        words = shlex.split(line)
    except ValueError:
        return False
    first = next((word for word in words if not re.match(r"[A-Z][A-Z_]*=", word)), "")
    return first in PROGRAMS or bool(re.fullmatch(r"(\.|deploy|examples|docs)/[\w./-]+", first))


def _is_python(text: str) -> bool:
    try:
        body = ast.parse(_dedented(text)).body
    except SyntaxError:
        return False
    return any(isinstance(one, (ast.ClassDef, ast.FunctionDef, ast.Import, ast.ImportFrom)) for one in body)


def _is_toml(text: str) -> bool:
    try:
        return bool(tomllib.loads(_dedented(text)))
    except ValueError:
        return False


def _dedented(text: str) -> str:
    return re.sub(r"^ {4}", "", text, flags=re.MULTILINE)
