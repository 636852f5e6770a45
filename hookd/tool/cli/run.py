"""`hookd run -- COMMAND`: the agent is there from the first step on."""

from __future__ import annotations

import contextlib
import functools
import os
from typing import TYPE_CHECKING

import click

from hookd.errors import HookdError, UsageError
from hookd.tool.cli import options, output, targets

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hookd.tool.attach.launch import Launch
    from hookd.tool.config import ServeConfig


@click.command(
    short_help="Start a command and watch every training it becomes.",
    context_settings={"allow_interspersed_args": False},
)
@click.argument("command", metavar="-- CMD…", nargs=-1, required=True)
@options.plugins
@click.option("--run", "name", metavar="NAME", help="The label `run`.  [default: found from the environment]")
@click.option("--listen", metavar="ADDR", help="Serve the metrics of this command on HOST:PORT.  [default: what the "
              "daemon serves that runs here, else 127.0.0.1:9465]")  # fmt: skip
@options.plugin_dirs
@click.option("--json", "as_json", is_flag=True, help="Print what keeps the command from starting as JSON, too.")
def run(
    *,
    command: tuple[str, ...],
    plugins: tuple[str, ...],
    name: str | None,
    listen: str | None,
    plugin_dirs: tuple[Path, ...],
    as_json: bool,  # noqa: ARG001  main looks at it
) -> None:
    """Start a command, and watch every training process that it becomes, through torchrun and the like.

    hookd need not be installed in the environment of the command. The exit code is the command's. The daemon that
    runs here (`hookd serve`) serves its metrics; where none does, they are served from here while the command runs.
    """
    from hookd.tool.attach import AttachRequest
    from hookd.tool.attach import command as process
    from hookd.tool.config import load
    from hookd.tool.daemon import log

    log.to_terminal()
    config = load({"listen": listen}, os.environ)
    request = AttachRequest(
        plugins=tuple(map(config.with_options, options.parse_plugins(plugins) or config.plugins)),
        run=name,
        plugin_dirs=(*plugin_dirs, *config.plugin_dirs),
        budget=config.budget,
        detail=config.detail,
    )
    process.run(command, request, functools.partial(_beside, config, listen is not None))


@contextlib.contextmanager
def _beside(config: ServeConfig, is_asked: bool, pid: int, prepared: Launch) -> Iterator[None]:  # noqa: FBT001
    with contextlib.ExitStack() as stack:
        output.say(_serve(config, stack, pid, is_asked=is_asked))
        yield
        _tell_end(prepared)


def _serve(config: ServeConfig, stack: contextlib.ExitStack, pid: int, *, is_asked: bool) -> str:
    """See to it that somebody serves the command's metrics, and say who does.

    The command is what a person waits for: a daemon that does not answer keeps it from running as little as a taken
    address does, unless that was asked for.

    Raises:
        HookdError: the address that was asked for cannot be had, or HOOKD_HOST is none.
    """
    from hookd.tool.cli import beside

    warning = ""
    if not is_asked:
        try:
            client = targets.daemon(None, timeout_s=targets.ANSWER_S)
            if client is not None:
                return f"metrics on {client.status()['url']}/metrics, by the daemon that runs here"
        except UsageError:
            raise
        except HookdError as error:
            warning = f"hookd: warning: {error.message}; the command runs all the same\n"
    try:
        url = stack.enter_context(beside.serving(config, pid))
    except HookdError as error:
        if is_asked:
            raise
        return f"{warning}hookd: metrics are not served: {error.message}; the command runs all the same. {error.hint}"
    return f"{warning}metrics on {url}/metrics, as long as the command runs"


def _tell_end(prepared: Launch) -> None:
    for pid, why in prepared.failures().items():
        output.say(f"hookd: process {pid} was not watched: {why}")
    if not prepared.has_started():
        output.say("hookd: no process of this command imported torch with hookd in it")
