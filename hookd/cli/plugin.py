"""`hookd plugin`: which plugins there are."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hookd.cli import options, output
from hookd.errors import PluginError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hookd.attach.payload import Source


@click.group()
def plugin() -> None:
    """Look at plugins."""


@plugin.command("list")
@click.option(
    "--plugin-dir",
    "plugin_dirs",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A directory with plugins of your own; may be repeated.",
)
@options.json
def list_(*, plugin_dirs: tuple[Path, ...], as_json: bool) -> int:
    """List the plugins that `-p NAME` finds, and the files of --plugin-dir that cannot be read."""
    found, broken = installed(plugin_dirs), unreadable(plugin_dirs)
    if as_json:
        output.emit({"plugins": found, "unreadable": [output.describe(error) for error in broken]})
    else:
        rows = [(one["name"], _habit(one), one["summary"], one["entry"]) for one in found]
        output.show(output.fill(output.table("PLUGIN", "", "WHAT IT DOES", "FROM"), rows))
    for error in broken:
        output.complain(error)
    return max((error.exit_code for error in broken), default=0)


def _habit(one: dict[str, Any]) -> str:
    if one["is_default"]:
        return "by default"
    return "changes training" if one["mutates"] else ""


def installed(plugin_dirs: Sequence[Path]) -> list[dict[str, Any]]:
    """Describe every plugin that can be found, from its source: nothing is imported."""
    from hookd.attach import payload
    from hookd.config import DEFAULT_PLUGINS

    defaults = {spec.name for spec in DEFAULT_PLUGINS}
    found = []
    for name in payload.names(plugin_dirs):
        source = payload.find(name, plugin_dirs)
        summary, mutates = read(source)
        is_default = name in defaults
        found.append(
            {"name": name, "entry": source.entry, "summary": summary, "mutates": mutates, "is_default": is_default}
        )
    return found


def unreadable(plugin_dirs: Sequence[Path]) -> list[PluginError]:
    """Give an error for each file that is no Python."""
    from hookd.attach import payload

    found = [one for directory in plugin_dirs for one in payload.in_directory(directory)]
    return [one for one in found if isinstance(one, PluginError)]


def read(source: Source) -> tuple[str, bool]:
    """Give the first line of the class' docstring, and whether it says that it changes training."""
    module, _, class_name = source.entry.partition(":")
    path = module.replace(".", "/")
    text = source.files.get(f"{path}/__init__.py") or source.files.get(f"{path}.py") or b""
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            summary = (ast.get_docstring(node) or "").split("\n", 1)[0]
            return summary, any(_says_mutates(statement) for statement in node.body)
    return "", False


def _says_mutates(node: ast.stmt) -> bool:
    target = (
        node.targets[0] if isinstance(node, ast.Assign) else node.target if isinstance(node, ast.AnnAssign) else None
    )
    if not isinstance(target, ast.Name) or not isinstance(node, (ast.Assign, ast.AnnAssign)):
        return False
    return target.id == "mutates" and isinstance(node.value, ast.Constant) and node.value.value is True
