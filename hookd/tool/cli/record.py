"""`hookd record PID`: where a target's time goes, module by module, from outside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hookd.tool.cli import options, output
from hookd.tool.cli.trace import replacing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookd.tool.attach.sampler import Recording

SUFFIXES = {"svg": ".svg", "speedscope": ".json"}


@click.command(short_help="Draw a flame graph of the modules that a target is in.")
@click.argument("pid", type=options.Pid())
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), metavar="S",
              help="For how long to record.  [default: 10]")  # fmt: skip
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="Optimizer steps to record, instead.")
@click.option("-o", "--output", "path", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Where to write it: .svg or .json says the format too.  [default: hookd-record-PID.svg]")  # fmt: skip
@click.option("--format", "kind", type=click.Choice(list(SUFFIXES)), help="A picture, or a file for speedscope.app.")
@click.option("--rate", "rate_hz", type=click.FloatRange(1, 2000), default=200.0, show_default=True, metavar="HZ",
              help="How often a second to look.")  # fmt: skip
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), default=60.0, show_default=True,
              metavar="S", help="Seconds that --steps may take.")  # fmt: skip
@options.json
def record(
    *, pid: int, seconds: float | None, steps: int | None, path: Path | None, kind: str | None, rate_hz: float,
    timeout_s: float, as_json: bool,
) -> int:  # fmt: skip
    """Draw a flame graph of the modules that a target is in, sampled from its page at no cost to it."""
    from hookd.tool.attach.sampler import sample
    from hookd.tool.cli import flame

    if seconds is not None and steps is not None:
        raise click.UsageError("Give --seconds or --steps, not both.")
    kind = kind or _kind_of(path)
    path = path or Path(f"hookd-record-{pid}{SUFFIXES[kind]}")
    if steps is None and seconds is None:
        seconds = 10.0
    found = sample(pid, rate_hz=rate_hz, seconds=seconds, steps=steps, timeout_s=timeout_s)
    title = f"process {pid}: {found.seconds:.1f} s, {found.steps} steps, {found.samples} samples"
    with replacing(path) as file:
        text = flame.svg(found, title) if kind == "svg" else json.dumps(flame.speedscope(found, title))
        file.write(text.encode())
    summary = _summary(found, pid, path, kind)
    if as_json:
        output.emit(summary)
    for line in _told(summary, rate_hz):
        output.say(line)
    return 0


def _kind_of(path: Path | None) -> str:
    if path is None:
        return "svg"
    for kind, suffix in SUFFIXES.items():
        if path.suffix == suffix:
            return kind
    raise click.UsageError(f"'{path}' ends neither in .svg nor in .json: say which with --format.")


def _summary(found: Recording, pid: int, path: Path, kind: str) -> dict[str, Any]:
    tracks = [{"name": track.name, "tid": track.tid} for track in found.tracks]
    return {
        "pid": pid, "path": str(path), "format": kind, "seconds": found.seconds, "samples": found.samples,
        "rate_hz": found.samples / found.seconds if found.seconds else 0.0, "longest_gap_s": found.longest_gap_s,
        "steps": found.steps, "threads": tracks, "ended": found.ended,
    }  # fmt: skip


def _told(summary: dict[str, Any], rate_hz: float) -> Iterator[str]:
    yield (f"{summary['path']}: {summary['seconds']:.1f} s and {summary['steps']} steps, {summary['samples']} samples"
           f" ({summary['rate_hz']:.0f} a second, {output.seconds(summary['longest_gap_s'])} apart at most)")  # fmt: skip
    if summary["ended"]:
        yield "the target ended, or was detached, before the time was over"
    if summary["rate_hz"] < rate_hz / 2:
        yield "this machine was too busy to look as often as was asked for"
