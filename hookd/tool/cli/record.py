"""`hookd record PID`: sample from outside which modules a target spends its time in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import click

from hookd.tool.cli import options, output
from hookd.tool.cli.trace import replacing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookd.tool.attach.sampler import Recording

SUFFIXES = {"svg": ".svg", "speedscope": ".json"}


class RecordedThread(TypedDict):
    """A thread in a recording."""

    name: str
    tid: int
    """Its thread id in the target's PID namespace."""


class Summary(TypedDict):
    """A recording, as `hookd record --json` prints it."""

    pid: int
    path: str
    """Of the file."""
    format: str
    """`svg` or `speedscope`."""
    seconds: float
    """Its duration."""
    samples: int
    rate_hz: float
    """Samples per second."""
    longest_gap_s: float
    """The longest time between two samples, in seconds."""
    steps: int
    """Steps that ended meanwhile."""
    threads: list[RecordedThread]
    ended: bool
    """Whether the target ended, or was detached, before it was complete."""


@click.command(short_help="Draw a flame graph of the modules of a target.")
@click.argument("pid", type=options.Pid())
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), metavar="S",
              help="Seconds to record.  [default: 10]")  # fmt: skip
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="Record N optimizer steps instead.")
@click.option("-o", "--output", "path", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Output file; its suffix, .svg or .json, sets the format.  [default: hookd-record-PID.svg]")  # fmt: skip
@click.option(
    "--format", "kind", type=click.Choice(list(SUFFIXES)), help="An SVG picture, or a file for speedscope.app."
)
@click.option("--rate", "rate_hz", type=click.FloatRange(1, 2000), default=200.0, show_default=True, metavar="HZ",
              help="Samples per second.")  # fmt: skip
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), default=60.0, show_default=True,
              metavar="S", help="Maximum time for --steps, in seconds.")  # fmt: skip
@options.json
def record(
    *, pid: int, seconds: float | None, steps: int | None, path: Path | None, kind: str | None, rate_hz: float,
    timeout_s: float, as_json: bool,
) -> int:  # fmt: skip
    """Draw a flame graph of the modules of a target.

    The modules are sampled from the target's page, in shared memory. This costs the target nothing.
    """
    from hookd.tool.attach.sampler import sample
    from hookd.tool.cli import flame

    if seconds is not None and steps is not None:
        raise click.UsageError("Use --seconds or --steps, not both.")
    kind = kind or _kind_of(path)
    path = path or Path(f"hookd-record-{pid}{SUFFIXES[kind]}")
    if steps is None and seconds is None:
        seconds = 10.0
    recording = sample(pid, rate_hz=rate_hz, seconds=seconds, steps=steps, timeout_s=timeout_s)
    title = f"process {pid}: {recording.seconds:.1f} s, {recording.steps} steps, {recording.samples} samples"
    with replacing(path) as file:
        text = flame.svg(recording, title) if kind == "svg" else json.dumps(flame.speedscope(recording, title))
        file.write(text.encode())
    summary = _summary(recording, pid, path, kind)
    if as_json:
        output.emit(summary)
    for line in _messages(summary, rate_hz):
        output.say(line)
    return 0


def _kind_of(path: Path | None) -> str:
    if path is None:
        return "svg"
    for kind, suffix in SUFFIXES.items():
        if path.suffix == suffix:
            return kind
    raise click.UsageError(f"'{path}' ends neither in .svg nor in .json: choose the format with --format.")


def _summary(recording: Recording, pid: int, path: Path, kind: str) -> Summary:
    tracks: list[RecordedThread] = [{"name": track.name, "tid": track.tid} for track in recording.tracks]
    return {
        "pid": pid, "path": str(path), "format": kind, "seconds": recording.seconds, "samples": recording.samples,
        "rate_hz": recording.samples / recording.seconds if recording.seconds else 0.0,
        "longest_gap_s": recording.longest_gap_s,
        "steps": recording.steps, "threads": tracks, "ended": recording.ended,
    }  # fmt: skip


def _messages(summary: Summary, rate_hz: float) -> Iterator[str]:
    yield (f"{summary['path']}: {summary['seconds']:.1f} s and {summary['steps']} steps, {summary['samples']} samples"
           f" ({summary['rate_hz']:.0f} per second, longest gap {output.seconds(summary['longest_gap_s'])})")  # fmt: skip
    if summary["ended"]:
        yield "the target ended, or was detached, before the recording was complete"
    if summary["rate_hz"] < rate_hz / 2:
        yield "the machine was too busy to sample at the requested rate"
