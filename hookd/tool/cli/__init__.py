"""The command `hookd`: one file per command group; this one turns errors into messages and exit codes.

Commands import what they need when they run, so that `hookd --help` loads neither torch nor an HTTP stack. A command
returns its exit code, or None for 0; only `main` prints errors.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import io
import sys
from typing import TYPE_CHECKING

import click

from hookd.errors import HookdError, UsageError
from hookd.tool.cli import output
from hookd.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS = {
    "ps": "hookd.tool.cli.ps:ps",
    "attach": "hookd.tool.cli.attach:attach",
    "detach": "hookd.tool.cli.attach:detach",
    "run": "hookd.tool.cli.run:run",
    "serve": "hookd.tool.cli.serve:serve",
    "top": "hookd.tool.cli.top.command:top",
    "status": "hookd.tool.cli.status:status",
    "report": "hookd.tool.cli.report:report",
    "stack": "hookd.tool.cli.stack:stack",
    "snapshot": "hookd.tool.cli.snapshot:snapshot",
    "eval": "hookd.tool.cli.eval:evaluate",
    "incidents": "hookd.tool.cli.incidents:incidents",
    "replay": "hookd.tool.cli.replay:replay",
    "trace": "hookd.tool.cli.trace:trace",
    "record": "hookd.tool.cli.record:record",
    "fingerprint": "hookd.tool.cli.fingerprint:fingerprint",
    "diff": "hookd.tool.cli.diff:diff",
    "plugin": "hookd.tool.cli.plugin:plugin",
    "config": "hookd.tool.cli.config:config",
    "doctor": "hookd.tool.cli.doctor:doctor",
    "demo": "hookd.tool.cli.demo:demo",
    "version": "hookd.tool.cli.version:version",
}
"""Module and attribute of each command, in the order of the help page."""

INTERRUPTED = 130


class Commands(click.Group):
    """The commands of `COMMANDS`, each imported when it is used, followed by those of plugins."""

    @functools.cached_property
    def _added(self) -> dict[str, click.Command]:
        return importlib.import_module("hookd.tool.cli.extensions").commands(COMMANDS)  # type: ignore[no-any-return]

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  (click's signature)
        """Return the names in the order of the help page."""
        return [*COMMANDS, *self._added]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import a command and return it, or None if there is none of that name."""
        if cmd_name not in COMMANDS:
            return self._added.get(cmd_name)
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command of the first word, as click does; the error for an unknown one names the command that is nearest.

        click's own error looks only among commands that are imported already.
        """
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            near = [] if args[0].startswith("-") else difflib.get_close_matches(args[0], self.list_commands(ctx), 1)
            if not near:
                raise
            raise click.UsageError(f"No such command '{args[0]}'. Did you mean '{near[0]}'?", ctx) from None


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, message="%(prog)s %(version)s")
def cli() -> None:
    """Attach to a running PyTorch training process, observe it, and leave it as it was.

    \b
    hookd ps                 which training processes run here
    hookd attach PID         watch one: metrics on http://127.0.0.1:9465/metrics, Ctrl-C detaches
    hookd report PID         what it is doing, layer by layer
    hookd top                all of them, live
    """  # noqa: D301  (\b is click's marker for "keep these lines")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hookd` with these arguments (default: those of the process) and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal without UTF-8 must not raise
        sys.stdout.reconfigure(errors="replace")
    as_json = "--json" in words[: words.index("--")] if "--" in words else "--json" in words
    try:
        return int(cli.main(words, prog_name="hookd", standalone_mode=False) or 0)
    except HookdError as error:
        return output.fail(error, as_json=as_json)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "hookd"
        return output.fail(UsageError(error.format_message(), hint=f"{where} --help"), as_json=as_json)
    except click.ClickException as error:
        return output.fail(HookdError(error.format_message()), as_json=as_json)
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
