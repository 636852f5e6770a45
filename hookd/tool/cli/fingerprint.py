"""`hookd fingerprint PID`: record digests of what each step computes."""

from __future__ import annotations

import signal
import threading
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hookd.tool.cli import options, output

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookd.tool.attach import AttachResult
    from hookd.tool.fingerprints.recording import Recorded

MIB = 1 << 20
PARTS = ("forward", "gradients", "update")


@click.command(short_help="Record digests of what each step computes, for `hookd diff`.")
@click.argument("pid", type=options.Pid())
@click.option("-o", "--output", "path", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Output file, which must not exist.  [default: hookd-fingerprint-PID.jsonl]")  # fmt: skip
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="Stop after N recorded steps.")
@click.option("--every", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="Record one step in N.")
@click.option("--modules", default="*", metavar="GLOB|GLOB", help="Names of the modules whose calls are recorded.  [default: all]")
@click.option("--what", default=",".join(PARTS), show_default=True, metavar="PARTS",
              help="What is recorded beside batch, random states and loss: forward, gradients and update, separated by commas.")  # fmt: skip
@click.option("--max-size", "max_mib", type=click.IntRange(1, 16_384), default=256, show_default=True, metavar="MIB",
              help="Maximum size of the file in MiB; beyond it, old steps keep their digest alone.")  # fmt: skip
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), default=10.0, show_default=True,
              metavar="S", help="Maximum time for the attach, in seconds.")  # fmt: skip
@options.json
def fingerprint(
    *, pid: int, path: Path | None, steps: int | None, every: int, modules: str, what: str, max_mib: int, timeout_s: float,
    as_json: bool,
) -> int:  # fmt: skip
    """Record digests of what each step computes, until Ctrl-C or the end of the process.

    `hookd diff A B` tells where two runs part.
    """
    from hookd.tool.fingerprints.recording import record

    path = path or Path(f"hookd-fingerprint-{pid}.jsonl")
    parts = what.split(",")
    if not set(parts) <= set(PARTS):
        raise click.BadParameter(f"choose from {', '.join(PARTS)}", param_hint="--what")
    wanted = {part: str(part in parts).lower() for part in PARTS}
    ending = threading.Event()
    before = {number: signal.signal(number, lambda *_: ending.set()) for number in (signal.SIGINT, signal.SIGTERM)}

    def began(result: AttachResult) -> None:
        output.say(f"recording process {pid} ({result.identity.get('run')}, rank {result.identity.get('rank')}) in {path}; Ctrl-C ends it")

    try:
        recorded = record(
            pid, path, {"every": str(every), "modules": modules, **wanted}, steps=steps, max_bytes=max_mib * MIB,
            timeout_s=timeout_s, began=began, is_over=ending.is_set,
        )  # fmt: skip
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if as_json:
        output.emit({"pid": pid, "path": str(path), **asdict(recorded)})
    for line in _messages(recorded, pid, path):
        output.say(line)
    return 0


def _messages(recorded: Recorded, pid: int, path: Path) -> Iterator[str]:
    if not recorded.steps:
        yield f"{path}: no step was recorded; the first one after the attach is left out"
    else:
        which = f"step {recorded.first}" if recorded.steps == 1 else f"{recorded.steps} steps, {recorded.first} to {recorded.last}"
        yield f"{path}: {which}, {recorded.bytes / MIB:.1f} MiB"
    if recorded.is_ended:
        yield f"process {pid} has ended"
    if recorded.lost:
        yield f"{recorded.lost} steps are missing, since they came faster than they could be written: see --every, --modules"
    if recorded.unread:
        yield f"{recorded.unread} tensors of a step are not in the file, since they are not in host memory"
