"""`hookd trace PID`: record some steps as a trace for Perfetto."""

from __future__ import annotations

import contextlib
import gzip
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

import click

from hookd.errors import HookdError
from hookd.tool.cli import options, output
from hookd.tool.linux import private_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookd.tool.attach.trace import Trace

MIB = 1 << 20


@click.command(short_help="Record N steps with torch's profiler, including hookd's modules.")
@click.argument("pid", type=options.Pid())
@click.option("--steps", type=click.IntRange(1, 10_000), default=3, show_default=True, metavar="N",
              help="Number of optimizer steps to record.")  # fmt: skip
@click.option("-o", "--output", "path", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Output file; compressed if its name ends in .gz.  [default: hookd-trace-PID.json]")  # fmt: skip
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), default=60.0, show_default=True,
              metavar="S", help="Maximum time for the steps, in seconds.")  # fmt: skip
@click.option("--max-size", "max_mib", type=click.IntRange(1, 16_384), default=256, show_default=True, metavar="MIB",
              help="Maximum uncompressed size of the trace in MiB.")  # fmt: skip
@options.json
def trace(*, pid: int, steps: int, path: Path | None, timeout_s: float, max_mib: int, as_json: bool) -> int:
    """Record N steps with torch's profiler, including hookd's modules.

    Open the file in ui.perfetto.dev.
    """
    from hookd.tool.attach.trace import take

    path = path or Path(f"hookd-trace-{pid}.json")
    with replacing(path) as file:
        if path.suffix == ".gz":
            with gzip.GzipFile("", "wb", compresslevel=5, fileobj=file) as packed:
                result = take(pid, steps, cast("BinaryIO", packed), timeout_s=timeout_s, max_bytes=max_mib * MIB)
        else:
            result = take(pid, steps, file, timeout_s=timeout_s, max_bytes=max_mib * MIB)
    if as_json:
        data = {"pid": pid, "path": str(path), **asdict(result), "is_cut": result.steps < steps}
        output.emit(data)
    for line in _messages(result, path, steps):
        output.say(line)
    return 0


def _messages(result: Trace, path: Path, steps: int) -> Iterator[str]:
    first, last = result.first, result.first + result.steps - 1
    which = f"step {first}" if first == last else f"steps {first} to {last}"
    yield (
        f"{path}: {which}, {result.bytes / MIB:.1f} MiB; profiler overhead outside the recorded steps:"
        f" {output.seconds(result.pause_s)}"
    )
    if result.steps < steps:
        yield f"the trace ends after {result.steps} of {steps} steps, because the target's memory grew: see --max-size"
    if not result.all_threads:
        yield "this version of torch records only the training thread and the threads of its backward"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file as `private_file.replacing` does: it shows code and shapes of a training.

    Raises:
        HookdError: reason "cannot-write".
    """
    try:
        with private_file.replacing(path) as file:
            yield file
    except OSError as exc:
        raise HookdError(f"cannot write {path}: {exc.strerror or exc}", reason="cannot-write",
                         hint="Choose another file with -o.") from exc  # fmt: skip
