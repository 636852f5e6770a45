"""Generate the pages of the documentation that describe the code: commands, metrics, hooks, the API of plugins, JSON.

    python docs/generate.py [DIRECTORY]

writes reference/* beside this file, or into another directory. It needs torch, for the metrics: it loads each plugin in
this process and reads its declarations. Run it after a change of a command, a hook or a metric; a test compares the
pages with the code.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click
import torch  # noqa: F401  (hookd starts where it is loaded)

import hookd
from hookd.api import hookspecs
from hookd.target.boot import bootstrap
from hookd.tool.cli import cli
from hookd.tool.daemon.fingerprints.keeper import Keeper
from hookd.tool.daemon.fleet.targets import Target
from hookd.tool.daemon.metrics.collector import AttachCounter, FleetCollector
from hookd.tool.daemon.metrics.selection import Limits
from hookd.tool.daemon.watch.drift import Drift
from hookd.tool.daemon.watch.hangs import Hangs
from hookd.tool.daemon.watch.stragglers import Stragglers
from hookd.wire.page import PageReader

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator

HERE = Path(__file__).resolve().parent
PLUGINS = HERE.parent / "plugins"
WIDTH = 96
MADE = "<!-- made by docs/generate.py: change the code, and run it -->\n\n"
EVERYTHING = {
    "activations": {"parameters": "true", "histogram": "true"},
    "capture": {"directory": tempfile.gettempdir()},
}
"""Options with which a plugin declares all of its metrics, and leaves no files in the user's directories."""
UNITS = {"seconds": "seconds", "bytes": "bytes", "ratio": "ratio", "steps": "steps", "score": "ratio"}
"""The unit that the last word of a name implies."""


class Row(NamedTuple):
    """A metric as a row of a table."""

    name: str
    kind: str
    labels: str
    unit: str
    help: str


# ---- commands


def commands() -> str:
    """Return the `--help` of every command."""
    text = "# Commands\n\nWhat `--help` says, of each command. The exit codes, and a table of what each is for, are in the\n"
    text += "[README](../../README.md#commands).\n"
    return text + "".join(_command(words, command) for words, command in walk(cli, ("hookd",)))


def walk(group: click.Group, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield each command below a group with the words that call it."""
    context = click.Context(group, info_name=words[-1])
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is None or command.hidden:
            continue
        yield (*words, name), command
        if isinstance(command, click.Group):
            yield from walk(command, (*words, name))


def _command(words: tuple[str, ...], command: click.Command) -> str:
    parent = click.Context(cli, info_name=" ".join(words[:-1]), terminal_width=WIDTH, max_content_width=WIDTH)
    context = click.Context(command, parent, info_name=words[-1], help_option_names=["-h", "--help"])
    text = "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
    return f"\n## {' '.join(words)}\n\n```text\n{text}\n```\n"


# ---- metrics


def metrics() -> str:
    """Return tables of every family: those of the daemon and of the agent, and those of each plugin."""
    names = sorted(path.name[len("hookd_") :] for path in PLUGINS.glob("hookd_*"))
    hookd.start([(name, EVERYTHING.get(name, {})) for name in names], run="docs")
    try:
        parts, fd = bootstrap._agent.parts, bootstrap._agent._page.fd  # noqa: SLF001
        owners = {metric.name: name for name in names for metric in parts.registry.named(name).context.metrics}
        of_page, scraped = _of_page(fd), list(_scraped(fd, owners))
    finally:
        hookd.stop()
    tables = {owner: [row for name, row in of_page.items() if owners.get(name, "") == owner] for owner in ("", *names)}
    own = {row.name.rstrip("*"): row for row in (*tables.pop(""), *_watched(), *scraped)}
    text = _HEAD + _table(own.values())
    for name, found in tables.items():
        if not found:  # a plugin that has no metrics
            continue
        text += f"\n## {name}\n\n" + _table(_with_units(name, found))
    return text


_HEAD = """# Metrics

All metrics also have the labels `run` and `rank`, except those marked with *, which belong to the daemon as a whole. `/metrics` does not serve
all series of a large model: [which, and the settings](../steps.md#what-is-on-metrics). The [plugins' page](../../plugins/README.md) defines
the metrics of each plugin.

## hookd itself

These are there whatever plugins are loaded.

"""


def _of_page(fd: int) -> dict[str, Row]:
    """Return the families that the agent and its plugins have declared, even those without a series."""
    page = PageReader(os.dup(fd))
    found = {one.name: _row(one.name, one.kind, one.labels, one.help) for one in page.read().families}
    page.close()
    return found


def _scraped(fd: int, owned: Container[str]) -> Iterator[Row]:
    """Scrape a daemon whose only target is this very process; yield its own families and those of a target."""
    target = Target(os.getpid(), os.dup(fd))
    fleet = type("Fleet", (), {"targets": lambda _: [target]})()
    for family in FleetCollector(fleet, AttachCounter(), Limits()).collect():
        labels = dict.fromkeys(label for sample in family.samples for label in sample.labels if label != "le")
        star = "" if {"run", "rank"} <= set(labels) else "*"
        if family.samples and family.name not in owned:
            rest = [label for label in labels if label not in {"run", "rank"}]
            yield _row(family.name, family.type, rest, family.documentation, star)
    target.close()


def _watched() -> list[Row]:
    declared = [one for watcher in (Hangs, Stragglers, Drift, Keeper) for one in watcher.families]
    return [_row(one.name, one.kind, one.labels, one.help) for one in declared]


def _with_units(plugin: str, found: Iterable[Row]) -> Iterator[Row]:
    units = {cells[0]: cells[3] for cells in rows(plugin) if cells[0].startswith("hookd_")}
    return (row._replace(unit=units.get(row.name, row.unit)) for row in found)


def rows(plugin: str) -> list[list[str]]:
    """Return the cells of all rows in the section of a plugin in plugins/README.md."""
    text = (PLUGINS / "README.md").read_text("utf-8")
    (section,) = re.findall(rf"^## {plugin}\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip(" `") for cell in line] for line in lines]


def _row(name: str, kind: str, labels: Iterable[str], text: str, star: str = "") -> Row:
    suffix = {"counter": "_total", "info": "_info"}.get(kind, "")
    return Row(f"{name}{suffix}{star}", kind, ", ".join(labels), UNITS.get(name.rpartition("_")[2], ""), text)


def _table(found: Iterable[Row]) -> str:
    lines = ["| metric | type | labels | unit | meaning |", "|---|---|---|---|---|"]
    lines += [f"| `{name}` | {' | '.join(rest)} |".replace("*`", "`*") for name, *rest in sorted(found)]
    return "\n".join(lines) + "\n"


# ---- hooks


def hooks() -> str:
    """Return the docstrings of all hooks, read from the source: an interpreter may change their indentation."""
    package = Path(hookspecs.__file__).parent
    head, _, rest = (ast.get_docstring(ast.parse((package / "__init__.py").read_text("utf-8"))) or "").partition("\n\n")
    text = f"# Hooks\n\n{head}\n\n{rest}\n".replace(":\n- ", ":\n\n- ")
    sources = [
        ast.parse((package / f"{part}.py").read_text("utf-8")) for part in ("life", "calls", "gradients", "steps")
    ]
    statements = [statement for source in sources for statement in source.body]
    specs = [one for one in statements if isinstance(one, ast.FunctionDef) and one.decorator_list]
    rows = [f"| [`{one.name}`](#{one.name}) | {_first_sentence(one)} |" for one in specs]
    return text + "\n".join(["\n| hook | when |", "|---|---|", *rows]) + "\n" + "".join(map(_hook, specs))


def _first_sentence(spec: ast.FunctionDef) -> str:
    words = re.split(r"(?<=[.:])\s", ast.get_docstring(spec) or "")[0].replace("\n", " ").rstrip(".:")
    return words.removeprefix("Run ").replace("|", r"\|")


def _hook(spec: ast.FunctionDef) -> str:
    arguments = ", ".join(argument.arg for argument in spec.args.args)
    text = re.sub(r"^ {4}", "", ast.get_docstring(spec, clean=False) or "", flags=re.MULTILINE).strip()
    if "\n@hookimpl" in text:  # where nothing else is as deep, a formatter takes the example's indent away
        words, example = text.split("\n@hookimpl")
        text = words + ("\n@hookimpl" + example).replace("\n", "\n    ")
    return f"\n## {spec.name}\n\n`{spec.name}({arguments})`\n\n{text}\n"


PAGES = {"commands.md": commands, "metrics.md": metrics, "hooks.md": hooks}


def main() -> None:
    """Write the files."""
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "reference"
    directory.mkdir(exist_ok=True)
    import api_reference  # noqa: PLC0415  this and the next are beside this file, for the script alone
    import json_reference  # noqa: PLC0415

    more = {"api.md": api_reference.page, "json.md": json_reference.page}
    pages = {name: MADE + make() for name, make in {**PAGES, **more}.items()}
    for name, text in (pages | {"json.schema.json": json_reference.schema()}).items():
        (directory / name).write_text(text, "utf-8")
        sys.stderr.write(f"wrote {name}\n")


if __name__ == "__main__":
    main()
