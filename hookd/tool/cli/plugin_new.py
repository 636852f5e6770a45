"""`hookd plugin new`: write a package with a plugin, and optionally a daemon plugin, that passes its own tests.

Templates are files that end in `.in`. With a daemon plugin, those of `templates/daemon` are used in addition to those of
`templates/plugin`; a template that ends in `.more` is appended to the file of its name.
"""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

import click

from hookd.errors import PluginError
from hookd.tool.cli import options, output

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hookd.tool.cli.outputs import NewPlugin

TEMPLATES = Path(__file__).parent.parent / "templates"


@click.command()
@click.argument("name", metavar="NAME")
@click.option("--dir", "directory", type=click.Path(path_type=Path, file_okay=False), default=Path(),
              help="Create the folder hookd-NAME here.  [default: the current directory]")  # fmt: skip
@click.option(
    "--daemon", "has_daemon", is_flag=True, help="Add a daemon plugin, which runs in the daemon and sees all ranks."
)
@options.json
def new(*, name: str, directory: Path, has_daemon: bool, as_json: bool) -> int:
    """Write a package with a new plugin.

    The package is written to the folder hookd-NAME: source, tests, README and entry points.
    """
    _require_free(name)
    home = directory / f"hookd-{name}"
    if home.exists():
        raise PluginError(f"{home} already exists", reason="exists", hint="Choose another name, or another --dir.")
    written = write(name, home, has_daemon=has_daemon)
    if as_json:
        data: NewPlugin = {"plugin": name, "directory": str(home), "files": [str(path) for path in written]}
        output.emit(data)
    else:
        for path in written:
            click.echo(path)
        output.say(f"next: cd {home}, edit {written_module(name, has_daemon=has_daemon)}, then `hookd plugin check .`")
    return 0


def _require_free(name: str) -> None:
    """Raise if the name is not valid for a plugin, or is taken.

    Raises:
        PluginError: with the reason.
    """
    from hookd.api.compatibility import CORE, is_name
    from hookd.tool.attach import sources

    if not is_name(name) or not name.isascii() or keyword.iskeyword(name):
        hint = f"Its first word must not be one of hookd's own: {', '.join(sorted(CORE))}."
        like = re.sub(r"\W+", "_", name.lower(), flags=re.ASCII).strip("_")
        if like != name and is_name(like) and not keyword.iskeyword(like):
            hint = f"Such as {like}. {hint}"
        raise PluginError(f"{name!r} cannot be a plugin's name: use a lower-case word, such as spread", hint=hint)
    if name in sources.names():
        raise PluginError(f"a plugin {name!r} already exists", hint="`hookd plugin list` lists all plugins.")


def write(name: str, home: Path, *, has_daemon: bool = False) -> list[Path]:
    """Write the files of a new plugin into a new folder, and return their paths."""
    from hookd.api.compatibility import API_VERSION

    words = {
        "name": name, "module": f"hookd_{name}", "class_name": "".join(part.capitalize() for part in name.split("_")),
        "summary": "The largest magnitude of outputs of linear layers, and the number of their calls.", "api": API_VERSION,
    }  # fmt: skip
    # The daemon imports the daemon plugin, and with it the package's __init__. The plugin for targets therefore needs a module
    # of its own; otherwise the daemon would import it as well.
    words["target"] = words["module"] + (".target" if has_daemon else "")
    # A plugin directory cannot hold a package that has a daemon plugin as well.
    words["first"] = "    pip install '.[daemon]'\n" if has_daemon else ""
    words["where"] = "" if has_daemon else " --plugin-dir ."
    written: dict[Path, None] = {}
    for folder in ("plugin", "daemon") if has_daemon else ("plugin",):
        for template in sorted((TEMPLATES / folder).rglob("*.*")):
            if template.suffix in (".in", ".more"):
                path = home / _place(template.relative_to(TEMPLATES / folder), words, has_daemon=has_daemon)
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("a") as file:
                    file.write(Template(template.read_text()).substitute(words))
                written[path] = None
    return list(written)


def _place(template: Path, words: Mapping[str, str], *, has_daemon: bool) -> Path:
    parts = [words["module"] if part == "module" else part for part in template.with_suffix("").parts]
    name = "__init__.py" if parts[-1] == "target.py" and not has_daemon else parts[-1]
    return Path(*parts[:-1], name.replace("plugin", words["name"]))


def written_module(name: str, *, has_daemon: bool = False) -> str:
    """Return the path of the file to edit first, relative to the package's folder."""
    return f"hookd_{name}/{'target' if has_daemon else '__init__'}.py"
