"""Options that several commands share."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from click.shell_completion import CompletionItem

    from hookd.tool.config import PluginSpec

WIDEST = 60
"""The most characters of a command line that a shell shows beside a pid."""

json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def number(text: str) -> int | None:
    """Return a whole number; None for other text, digits of other scripts, and numbers that may exceed 64 bits."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else None


class Pid(click.ParamType):  # type: ignore[type-arg]
    """A process id; the process need not exist."""

    name = "pid"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:  # noqa: ARG002
        """Return the pid, or raise an error that names `hookd ps`."""
        if isinstance(value, int):
            return value
        if pid := number(value):
            return pid
        raise click.UsageError(f"'{value}' is not a process id; `hookd ps` lists the training processes.", ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002
        """Return the processes that `hookd ps` lists, with their command lines."""
        from click.shell_completion import CompletionItem

        from hookd.tool.attach.discover import candidates
        from hookd.wire.text import one_line

        listed = [process for process in candidates() if process.state != "skipped"]
        items = [(str(process.pid), one_line(" ".join(process.cmdline))[:WIDEST]) for process in listed]
        return [CompletionItem(pid, help=command) for pid, command in items if pid.startswith(incomplete)]


class User(click.ParamType):  # type: ignore[type-arg]
    """A user, by name or number."""

    name = "user"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:  # noqa: ARG002
        """Return the uid of the user."""
        from hookd.tool.linux.owner import uid_named

        return value if isinstance(value, int) else uid_named(value)


user = click.option("--user", type=User(), metavar="USER", help="Select this user only, by name or number.")

host = click.option(
    "--host",
    metavar="unix://PATH",
    envvar="HOOKD_HOST",
    help="The daemon's control socket.  [default: that of `hookd serve`; env: HOOKD_HOST]",
)


def complete_plugin(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of installed plugins that begin with `incomplete`."""
    from hookd.tool.attach.sources import names

    return [name for name in names(()) if name.startswith(incomplete)]


plugins = click.option(
    "-p",
    "--plugin",
    "plugins",
    multiple=True,
    metavar="NAME[:KEY=VALUE,…]",
    shell_complete=complete_plugin,
    help="A plugin to load; may be repeated.  [default: nan, timing, activations, learning]",
)

plugin_dirs = click.option(
    "--plugin-dir",
    "plugin_dirs",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A directory with plugins of your own; may be repeated.",
)


@dataclasses.dataclass(frozen=True)
class Watch:
    """Options of `attach`; for their defaults see the options below.

    Attributes:
        plugins: with their options; empty: those of the daemon's configuration, else nan, timing, activations and learning.
        tree: the process and all its descendants.
        match: a rule that selects targets.
        user: `match` and `tree` select only processes of this user.
        timeout_s: how long one attach may take.
        listen: HOST:PORT of an embedded daemon, or None.
        keep: the agent stays in the target when hookd ends.
        force: also try methods that may disturb a target that hangs or is short of resources, and load plugins that `hookd plugin
            check` finds problems in.
        plugin_dirs: where else to look for plugins.
    """

    plugins: tuple[PluginSpec, ...]
    tree: bool
    match: str | None
    user: str | None
    timeout_s: float
    listen: str | None
    keep: bool
    force: bool
    plugin_dirs: tuple[Path, ...]


OF_WATCH = (
    plugins,
    click.option("--tree", is_flag=True, help="Attach to the process and all its descendants that train."),
    click.option(
        "--match",
        metavar="RULE",
        help="Attach to processes whose command line contains RULE (or matches it as a glob).",
    ),
    click.option("--user", metavar="USER", help="With --match or --tree, attach to processes of USER only."),
    click.option(
        "--timeout",
        "timeout_s",
        type=click.FloatRange(min=0, min_open=True),
        default=10.0,
        show_default=True,
        metavar="S",
        help="Seconds that one attach may take.",
    ),
    click.option("--listen", metavar="ADDR", help="Serve only these targets, on HOST:PORT, until Ctrl-C."),
    click.option("--keep", is_flag=True, help="Leave the agent in the target when hookd ends."),
    click.option(
        "--force",
        is_flag=True,
        help="Also try methods that may disturb a target that hangs or is short of resources, and load plugins with problems.",
    ),
    plugin_dirs,
)


def parse_plugins(texts: Sequence[str]) -> tuple[PluginSpec, ...]:
    """Parse the value of each -p."""
    from hookd.tool.config import PluginSpec

    chosen = tuple(PluginSpec.parse(text) for text in texts)
    names = [spec.name for spec in chosen]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise click.UsageError(f"-p {twice} is given twice; give all its options with one -p.")
    return chosen


def watch(command: Callable[..., int | None]) -> Callable[..., int | None]:
    """Add the options of `attach` to a command, as one argument `watch`."""

    @functools.wraps(command)
    def with_watch(*args: Any, **kwargs: Any) -> int | None:
        values = {field.name: kwargs.pop(field.name) for field in dataclasses.fields(Watch)}
        values["plugins"] = parse_plugins(values["plugins"])
        return command(*args, watch=Watch(**values), **kwargs)

    for option in reversed(OF_WATCH):
        with_watch = option(with_watch)
    return with_watch
