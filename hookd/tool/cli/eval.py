"""`hookd eval PID EXPR`: evaluate an expression in a target, where the daemon allows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hookd.errors import DaemonNotRunning
from hookd.tool.cli import options, output, root_daemon, targets

if TYPE_CHECKING:
    from hookd.wire.answer import EvaluatedTarget


@click.command("eval", short_help="Evaluate a Python expression in a target.")
@click.argument("pid", type=options.Pid())
@click.argument("expression", metavar="EXPR")
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True, max=3600), default=5.0, metavar="S",
              show_default=True, help="Seconds after which the evaluation is interrupted.")  # fmt: skip
@options.host
@options.json
def evaluate(*, pid: int, expression: str, timeout_s: float, host: str | None, as_json: bool) -> int:
    """Evaluate a Python expression in a target, and print the result.

    The names `model`, `models`, `optimizers`, `torch` and `step` are available. The daemon's configuration must allow this
    ([eval] allow = true); each evaluation is recorded in its log and as an incident of the target.
    """
    client = targets.daemon(host)
    if client is None:
        of_root = root_daemon.find()
        known = "none runs" if of_root is None else of_root.description
        hint = "Start `hookd serve` with a configuration that has [eval] allow = true."
        raise DaemonNotRunning(f"`hookd eval` needs a daemon: {known}", hint=hint)
    answer = client.evaluate(pid, expression, timeout_s)
    if as_json:
        output.emit(answer)
    if answer["state"] == "done":
        if not as_json:
            click.echo(output.plain(str(answer["result"]), lines=True))
        if answer.get("is_cut"):
            output.say("the result is truncated; only its beginning is shown")
        return 0
    output.say(output.plain(_failure(answer), lines=True))
    return 1


def _failure(answer: EvaluatedTarget) -> str:
    if answer["state"] == "raised":
        return str(answer.get("traceback")).rstrip()
    if answer["state"] == "interrupted":
        return f"hookd: error: interrupted after {answer['seconds']:.3g} s; --timeout allows more time"
    frames = answer.get("frames")
    where = "".join(f"\n  {frame}" for frame in frames) if isinstance(frames, list) else ""
    return (
        f"hookd: error: {answer.get('error') or 'it did not end when it was interrupted, and is still running'}{where}"
    )
