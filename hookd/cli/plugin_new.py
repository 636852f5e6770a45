"""`hookd plugin new`: a package with a plugin in it that passes its own tests."""

from __future__ import annotations

import keyword
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

import click

from hookd.cli import options, output
from hookd.errors import PluginError

if TYPE_CHECKING:
    from collections.abc import Mapping

TEMPLATES = Path(__file__).parent.parent / "templates" / "plugin"


@click.command()
@click.argument("name", metavar="NAME")
@click.option("--dir", "directory", type=click.Path(path_type=Path, file_okay=False), default=Path(),
              help="Where the folder hookd-NAME is made; by default here.")  # fmt: skip
@options.json
def new(*, name: str, directory: Path, as_json: bool) -> int:
    """Write a package with a plugin NAME: its source, tests, README and entry point."""
    _require_free(name)
    home = directory / f"hookd-{name}"
    if home.exists():
        raise PluginError(f"{home} is there already", reason="exists", hint="Take another name, or another --dir.")
    written = write(name, home)
    if as_json:
        output.emit({"plugin": name, "directory": str(home), "files": [str(path) for path in written]})
    else:
        for path in written:
            click.echo(path)
        output.say(f"next: cd {home}, edit {written_module(name)}, then `hookd plugin check .`")
    return 0


def _require_free(name: str) -> None:
    """Refuse what cannot be a plugin's name, or is one already.

    Raises:
        PluginError: says why.
    """
    from hookd.api import CORE, is_name
    from hookd.attach import sources

    if not is_name(name) or not name.isascii() or keyword.iskeyword(name):
        hint = f"It begins with none of {', '.join(sorted(CORE))}, which are hookd's own."
        raise PluginError(f"{name!r} cannot be a plugin's name: it is a lower-case word, such as spread", hint=hint)
    if name in sources.names():
        raise PluginError(f"there is a plugin {name!r} already", hint="`hookd plugin list` shows all of them.")


def write(name: str, home: Path) -> list[Path]:
    """Write the files of a new plugin into a folder that is made for it; give their paths."""
    from hookd.api import API_VERSION

    words = {
        "name": name, "module": f"hookd_{name}", "class_name": "".join(part.capitalize() for part in name.split("_")),
        "summary": "The largest magnitude of what linear layers give, and how often they are called.", "api": API_VERSION,
    }  # fmt: skip
    written = []
    for template in sorted(TEMPLATES.rglob("*.in")):
        path = home / _place(template.relative_to(TEMPLATES), words)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(Template(template.read_text()).substitute(words))
        written.append(path)
    return written


def _place(template: Path, words: Mapping[str, str]) -> Path:
    parts = [words["module"] if part == "module" else part for part in template.with_suffix("").parts]
    return Path(*parts[:-1], parts[-1].replace("plugin", words["name"]))


def written_module(name: str) -> str:
    """Give the path of the file to edit, inside the package's folder."""
    return f"hookd_{name}/__init__.py"
