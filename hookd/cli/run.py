"""`hookd run -- COMMAND`: the agent is there from the first step on."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import click

from hookd.cli import options, output
from hookd.errors import UsageError

if TYPE_CHECKING:
    from hookd.attach.launch import Launch
    from hookd.cli.options import Watch


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("command", metavar="-- CMD…", nargs=-1, required=True)
@click.option("--run", "name", metavar="NAME", help="The label `run`.  [default: found from the environment]")
@options.watch
@options.json
def run(*, command: tuple[str, ...], name: str | None, watch: Watch, as_json: bool) -> int:  # noqa: ARG001
    """Start a command, and watch every training process that it becomes, through torchrun and the like.

    hookd need not be installed in the environment of the command. The exit code is the command's. `hookd serve`
    finds its processes; with --listen their metrics are served from here, as long as the command runs.
    """
    from hookd.attach import AttachRequest, launch
    from hookd.config import load

    if watch.match is not None:
        raise UsageError("--match picks processes that run already", hint="hookd attach --match RULE")
    config = load({"listen": watch.listen}, os.environ)
    request = AttachRequest(
        plugins=tuple(map(config.with_options, watch.plugins or config.plugins)),
        run=name,
        plugin_dirs=(*watch.plugin_dirs, *config.plugin_dirs),
        budget=config.budget,
        detail=config.detail,
    )
    with contextlib.ExitStack() as stack:
        if watch.listen is not None:
            from hookd.cli import beside

            url = stack.enter_context(beside.serving(config))
            output.say(f"metrics on {url}/metrics, as long as the command runs")
        return launch.run(command, request, ended=_tell_failures)


def _tell_failures(launch: Launch) -> None:
    for pid, why in launch.failures().items():
        output.say(f"hookd: process {pid} was not watched: {why}")
