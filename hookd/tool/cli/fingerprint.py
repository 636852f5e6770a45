"""`hookd fingerprint PID`: record digests of what each step computes."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

import click

from hookd.errors import HookdError
from hookd.tool.cli import options, output

if TYPE_CHECKING:
    from hookd.tool.attach import AttachResult


class RecordedFile(TypedDict):
    """A fingerprint that was recorded."""

    pid: int
    path: str
    """Of the file."""
    first: int
    """Number of the first step; 0 if there is none."""
    last: int
    """Number of the last step."""
    steps: int
    """Number of steps in the file."""
    lost: int
    """Number of steps that came faster than they could be written."""
    unread: int
    """Number of tensors of the last step that were not in host memory."""
    bytes: int
    """Size of the file."""
    is_ended: bool
    """Whether the process ended meanwhile."""
    is_detached: bool
    """Whether hookd was detached from it meanwhile."""


MIB = 1 << 20
PARTS = ("forward", "gradients", "update")
ALL_PARTS = ("forward", "backward", "gradients", "update")


@click.command(
    short_help="Record digests of what each step computes, for `hookd diff`.",
    context_settings={"allow_interspersed_args": True},
)
@click.argument("target", nargs=-1, required=True, metavar="PID | --twice -- CMD…")
@click.option("--twice", is_flag=True, help="Run a command twice, and tell whether both runs compute the same.")
@click.option("-o", "--output", "path", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Output file, which must not exist.  [default: hookd-fingerprint-PID.jsonl]")  # fmt: skip
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="Stop after N recorded steps.")
@click.option(
    "--every", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="Record one step in N."
)
@click.option(
    "--modules", default="*", metavar="GLOB|GLOB", help="Names of the modules whose calls are recorded.  [default: all]"
)
@click.option("--what", default=",".join(PARTS), show_default=True, metavar="PARTS",
              help="What is recorded beside batch, random states and loss, separated by commas; backward, the gradients of inputs and "
              "outputs, costs most.")  # fmt: skip
@click.option("--max-size", "max_mib", type=click.IntRange(1, 16_384), default=256, show_default=True, metavar="MIB",
              help="Maximum size of the file in MiB; beyond it, old steps keep their digest alone.")  # fmt: skip
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), default=10.0, show_default=True,
              metavar="S", help="Maximum time for the attach, in seconds.")  # fmt: skip
@options.json
def fingerprint(
    *, target: tuple[str, ...], twice: bool, path: Path | None, steps: int | None, every: int, modules: str, what: str, max_mib: int, timeout_s: float,
    as_json: bool,
) -> int:  # fmt: skip
    """Record digests of what each step computes, until Ctrl-C or the end of the process.

    `hookd diff A B` tells where two runs part.
    """
    from hookd.tool.fingerprints.command import message
    from hookd.tool.fingerprints.recording import record

    if twice and (path is not None or steps is not None):
        raise click.UsageError("With --twice nothing is kept: -o and --steps do not go with it.")
    if twice:
        return _twice(target, _options(every, modules, what), as_json=as_json)
    if len(target) > 1:
        raise click.UsageError("One process at a time; `hookd fingerprint --twice -- CMD` runs a command.")
    pid = options.Pid().convert(target[0], None, None)
    path = path or Path(f"hookd-fingerprint-{pid}.jsonl")
    ending = threading.Event()
    before = {number: signal.signal(number, lambda *_: ending.set()) for number in (signal.SIGINT, signal.SIGTERM)}

    def began(result: AttachResult) -> None:
        output.say(
            f"recording process {pid} ({result.identity.get('run')}, rank {result.identity.get('rank')}) in {path}; Ctrl-C ends it"
        )

    try:
        recorded = record(
            pid, path, _options(every, modules, what), steps=steps, max_bytes=max_mib * MIB,
            timeout_s=timeout_s, began=began, is_over=ending.is_set,
        )  # fmt: skip
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if as_json:
        output.emit(cast("RecordedFile", {"pid": pid, "path": str(path), **asdict(recorded)}))
    output.say(message(path, recorded))
    if recorded.is_ended:
        output.say(f"process {pid} has ended")
    if recorded.is_detached:
        output.say(f"hookd was detached from process {pid}: the recording ends here")
    return 0


def _options(every: int, modules: str, what: str) -> dict[str, str]:
    """Return the options of the plugin.

    Raises:
        BadParameter: there is no such part.
    """
    parts = what.split(",")
    if not set(parts) <= set(ALL_PARTS):
        raise click.BadParameter(f"choose from {', '.join(ALL_PARTS)}", param_hint="--what")
    return {"every": str(every), "modules": modules, **{part: str(part in parts).lower() for part in ALL_PARTS}}


def _twice(command: tuple[str, ...], given: dict[str, str], *, as_json: bool) -> int:
    """Run a command twice under `hookd run`, one after the other, and compare the fingerprints of each rank."""
    from hookd.tool.cli.diff import compared, show

    with tempfile.TemporaryDirectory(prefix="hookd-twice-") as scratch:
        directories = [Path(scratch) / run for run in ("a", "b")]
        for directory in directories:
            directory.mkdir()
            plugin = "fingerprint:" + ",".join(f"{name}={value}" for name, value in given.items())
            to = ("--fingerprint", str(directory / "run.jsonl"))
            words = [sys.executable, "-m", "hookd", "run", "-p", plugin, *to, "--", *command]
            code = subprocess.run(words, check=False, stdout=sys.stderr).returncode
            if code:
                raise HookdError(f"the command has failed with exit code {code}", reason="command-failed")
        ranks = sorted(path.name for path in directories[0].iterdir() if (directories[1] / path.name).exists())
        if not ranks:
            raise HookdError(
                "no training step was recorded", reason="nothing-recorded", hint="Does the command train with torch?"
            )
        found = [compared(directories[0] / rank, directories[1] / rank) for rank in ranks]
    if as_json:
        output.emit(found)
    else:
        for one in found:
            show(one)
    return max(one["code"] for one in found)
