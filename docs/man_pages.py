"""Write manual pages of hookd and of each of its commands, from their `--help`.

    python docs/man_pages.py DIRECTORY

writes hookd.1, hookd-attach.1 and so on into a directory, such as /usr/local/share/man/man1. It needs hookd alone, not torch.
Commands that installed plugins add have pages, too. click-man 0.6 would be a library for this; it misses commands that a group
imports when they are used, and joins lines that click keeps.
"""

from __future__ import annotations

import re
import sys
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hookd.tool.cli import cli
from hookd.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

README = Path(__file__).resolve().parents[1] / "README.md"
SPECIAL = {"\\": r"\e", "-": r"\-", "'": r"\(aq", "`": r"\(ga", "~": r"\(ti", "^": r"\(ha"}
"""Characters that roff would take for something else, or show as typographic ones, which no shell understands."""
KEPT = "\b\n"
"""click's mark at the begin of a paragraph whose lines are kept."""


def pages() -> dict[str, str]:
    """Return each page by the name of its file."""
    return {f"{_name(context)}.1": page(context) for context in contexts(cli, "hookd")}


def contexts(command: click.Command, name: str, parent: click.Context | None = None) -> Iterator[click.Context]:
    """Yield a context of a command and of all below it."""
    context = click.Context(command, parent, info_name=name, help_option_names=["-h", "--help"])
    yield context
    for below, one in _commands(context):
        yield from contexts(one, below, context)


def page(context: click.Context) -> str:
    """Return the page of a command, in roff."""
    text, title = cleandoc(context.command.help or ""), _name(context)
    sections = {
        "NAME": [f"{escaped(title)} \\- {escaped(_first_sentence(text))}"],
        "SYNOPSIS": [f"\\fB{escaped(context.command_path)}\\fR {escaped(_usage(context))}"],
        "DESCRIPTION": list(_paragraphs(text)),
        "OPTIONS": list(_options(context)),
        "COMMANDS": list(_items((f"\\fB{escaped(f'{title}-{name}')}\\fR(1)", _first_sentence(one.help or ""))
                                for name, one in _commands(context))),
        "EXIT STATUS": list(_items((f"\\fB{code}\\fR", meaning) for code, meaning in _exit_codes())),
        "SEE ALSO": [f"\\fB{escaped(_name(context.parent))}\\fR(1)"] if context.parent else [],
    }  # fmt: skip
    head = f'.TH "{escaped(title.upper())}" 1 "" "hookd {__version__}" "hookd"'
    lines = [line for section, body in sections.items() if body for line in (f'.SH "{section}"', *body)]
    return "\n".join([head, *lines]) + "\n"


def escaped(text: str) -> str:
    """Escape plain text for roff; the result is ASCII, whatever the encoding of the reader."""
    shown = "".join(SPECIAL.get(char, char if char.isascii() else f"\\[u{ord(char):04X}]") for char in text)
    return f"\\&{shown}" if shown.startswith(".") else shown


def _name(context: click.Context) -> str:
    return context.command_path.replace(" ", "-")


def _commands(context: click.Context) -> list[tuple[str, click.Command]]:
    group = context.command
    if not isinstance(group, click.Group):
        return []
    found = ((name, group.get_command(context, name)) for name in group.list_commands(context))
    return [(name, command) for name, command in found if command is not None and not command.hidden]


def _first_sentence(text: str) -> str:
    return re.split(r"\.(?:\s|$)", " ".join(text.split()))[0]


def _usage(context: click.Context) -> str:
    return " ".join(context.command.collect_usage_pieces(context))


def _paragraphs(text: str) -> Iterator[str]:
    for number, paragraph in enumerate(text.split("\n\n")):
        if number:
            yield ".PP"
        if paragraph.startswith(KEPT):
            yield from (".EX", *map(escaped, paragraph.removeprefix(KEPT).splitlines()), ".EE")
        else:
            yield escaped(" ".join(paragraph.split()))


def _options(context: click.Context) -> Iterator[str]:
    options = [one for one in context.command.get_params(context) if isinstance(one, click.Option)]
    records = [one.get_help_record(context) for one in options]
    return _items((" ".join(map(_font, names.split())), text) for names, text in filter(None, records))


def _font(word: str) -> str:
    return f"\\f{'B' if word.startswith('-') else 'I'}{escaped(word)}\\fR"


def _items(items: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield a list of terms, in roff, each with its plain text."""
    for term, text in items:
        yield from (".TP", term, escaped(" ".join(text.split())))


def _exit_codes() -> list[tuple[str, str]]:
    found = re.findall(r"^\| (\d+) \| (.+) \|$", README.read_text("utf-8"), re.MULTILINE)
    return [(code, meaning.replace("`", "")) for code, meaning in found]


def main() -> None:
    """Write the files."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python docs/man_pages.py DIRECTORY")
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    made = pages()
    for name, text in made.items():
        (directory / name).write_text(text, "ascii")
    sys.stderr.write(f"wrote {len(made)} pages into {directory}\n")


if __name__ == "__main__":
    main()
