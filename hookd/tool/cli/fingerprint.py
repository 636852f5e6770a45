"""`hookd fingerprint PID`: record digests of what each step computes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

import click
from click.core import ParameterSource

from hookd.errors import HookdError
from hookd.tool.cli import options, output
from hookd.tool.reports.wording import moment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookd.tool.attach import AttachResult
    from hookd.tool.cli.diff import Parting
    from hookd.wire.fingerprint import KeptRow


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
    """Largest number of tensors of a step that could not be read."""
    bytes: int
    """Size of the file."""
    is_ended: bool
    """Whether the process ended meanwhile."""
    is_detached: bool
    """Whether hookd was detached from it meanwhile."""


MIB = 1 << 20
PARTS = ("forward", "gradients", "update")
RESUMED = "Does the command go on from a checkpoint that the first run has written? Remove it, or let each run write to another place."
ALL_PARTS = ("forward", "backward", "gradients", "update")


@click.command(
    short_help="Record digests of what each step computes, for `hookd diff`.",
    context_settings={"allow_interspersed_args": True},
)
@click.argument("target", nargs=-1, metavar="PID | --twice -- CMD… | --list")
@click.option("--twice", is_flag=True, help="Run a command twice, and tell whether both runs compute the same.")
@click.option("--list", "is_list", is_flag=True, help="List the fingerprints that the daemon keeps.")
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
@options.host
@options.json
def fingerprint(
    *, target: tuple[str, ...], twice: bool, is_list: bool, path: Path | None, steps: int | None, every: int, modules: str, what: str, max_mib: int, timeout_s: float,
    host: str | None, as_json: bool,
) -> int:  # fmt: skip
    """Record digests of what each step computes, until Ctrl-C or the end of the process.

    `hookd diff A B` tells where two runs part. A daemon keeps the fingerprints of targets that have the plugin `fingerprint`.
    """
    from hookd.tool.fingerprints.command import message, require_writable
    from hookd.tool.fingerprints.recording import record

    if is_list:
        if target or twice:
            raise click.UsageError("--list takes no process.")
        return _list(host, as_json=as_json)
    if not target:
        raise click.UsageError("Name a process (`hookd ps` lists them), or a command: --twice -- CMD.")
    if twice and (path is not None or steps is not None):
        raise click.UsageError("With --twice nothing is kept: -o and --steps do not go with it.")
    if twice and {_source("max_mib"), _source("timeout_s")} != {ParameterSource.DEFAULT}:
        raise click.UsageError("With --twice nothing is attached to: --max-size and --timeout do not go with it.")
    if twice and "," in modules:
        raise click.BadParameter(
            "with --twice, a name cannot have a comma; separate names by |", param_hint="--modules"
        )
    if twice:
        return _twice(target, _options(every, modules, what), as_json=as_json)
    if len(target) > 1:
        raise click.UsageError("One process at a time; `hookd fingerprint --twice -- CMD` runs a command.")
    pid = options.Pid().convert(target[0], None, None)
    path = path or Path(f"hookd-fingerprint-{pid}.jsonl")
    require_writable(path)
    ending = threading.Event()
    before = {number: signal.signal(number, lambda *_: ending.set()) for number in (signal.SIGINT, signal.SIGTERM)}

    def began(result: AttachResult) -> None:
        output.say(
            f"recording process {pid} ({result.identity.get('run')}, rank {result.identity.get('rank')}) in {path}; Ctrl-C ends it"
        )

    try:
        recorded = record(
            pid, path, _options(every, modules, what), steps=steps, max_bytes=max_mib * MIB,
            timeout_s=timeout_s, began=began, is_over=lambda _: ending.is_set(),
        )  # fmt: skip
    except HookdError as error:
        raise _explained(error, pid, host) from error
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


def _source(name: str) -> ParameterSource | None:
    return click.get_current_context().get_parameter_source(name)


def _explained(error: HookdError, pid: int, host: str | None) -> HookdError:
    """Return an error that names the daemon's file, if it is the daemon that reads the records."""
    path = kept_of(pid, host) if error.reason == "busy" else None
    if path is None:
        return error
    return HookdError(f"the daemon keeps the fingerprint of process {pid}, in {path}", reason="busy",
                      hint=f"`hookd diff {pid} OTHER` compares it.")  # fmt: skip


def kept_of(pid: int, host: str | None) -> Path | None:
    """Return the file in which the daemon keeps the fingerprint of a living process; None without one."""
    from hookd.tool.cli import targets

    client = targets.daemon(host)
    rows = [] if client is None else client.fingerprints()
    return next((Path(row["path"]) for row in rows if row["pid"] == pid and row["is_live"]), None)


def _list(host: str | None, *, as_json: bool) -> int:
    from hookd.tool.cli import targets

    client = targets.daemon(host)
    rows = [] if client is None else client.fingerprints()
    if as_json:
        output.emit(rows)
    elif client is None:
        output.say(
            "no daemon is running: `hookd serve` keeps the fingerprints of targets that have the plugin fingerprint"
        )
    elif not rows:
        output.say(
            "the daemon keeps none; with the plugin fingerprint in a target it does: `hookd plugin enable PID fingerprint`"
        )
    else:
        output.say(f"in {Path(rows[0]['path']).parent}:\n")
        output.show(
            output.fill(
                output.table("RUN", "RANK", "PID", "STEPS", "LAST", "DIGEST", "BEGAN", "FILE"), map(_cells, rows)
            )
        )
    return 0


def _cells(row: KeptRow) -> tuple[str, ...]:
    return (
        row["run"], row["rank"], f"{row['pid']}" if row["is_live"] else "-", f"{row['steps']:,}", f"{row['step']:,}" if row["step"] else "-",
        row["digest"] or "-", moment(row["began"]), Path(row["path"]).name,
    )  # fmt: skip


def _options(every: int, modules: str, what: str) -> dict[str, str]:
    """Return the options of the plugin.

    Raises:
        BadParameter: there is no such part.
    """
    parts = what.split(",")
    if not set(parts) <= set(ALL_PARTS):
        raise click.BadParameter(f"choose from {', '.join(ALL_PARTS)}", param_hint="--what")
    return {"every": str(every), "modules": modules, **{part: str(part in parts).lower() for part in ALL_PARTS}}


@contextlib.contextmanager
def _input() -> Iterator[int]:
    """Yield what the first and the second run read: a file from where it stands; of anything else the second would get nothing."""
    try:
        at = os.lseek(0, 0, os.SEEK_CUR)
    except OSError:  # a terminal, a pipe, or closed
        yield subprocess.DEVNULL
    else:
        yield 0
        os.lseek(0, at, os.SEEK_SET)


def _run(words: list[str]) -> int:
    """Run a command to its end, also if this process is asked to end meanwhile: then the command is, too."""
    with undone_by_sigterm(), _input() as given, subprocess.Popen(words, stdin=given, stdout=sys.stderr) as process:
        try:
            return process.wait()
        except BaseException:
            process.terminate()
            raise


@contextlib.contextmanager
def undone_by_sigterm() -> Iterator[None]:
    """Raise SystemExit in the block at SIGTERM, so that what was begun is undone."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _twice(command: tuple[str, ...], given: dict[str, str], *, as_json: bool) -> int:
    """Run a command twice under `hookd run`, one after the other, and compare the fingerprints of each rank."""
    from hookd.tool.cli.diff import CannotCompareError, show
    from hookd.tool.fingerprints.comparison import DIFFERENT

    with tempfile.TemporaryDirectory(prefix="hookd-twice-") as scratch:
        directories = [Path(scratch) / run for run in ("first", "second")]
        for directory in directories:
            directory.mkdir()
            plugin = "fingerprint:" + ",".join(f"{name}={value}" for name, value in given.items())
            to = ("--fingerprint", str(directory / "run.jsonl"))
            words = [sys.executable, "-m", "hookd", "run", "-p", plugin, *to, "--", *command]
            code = _run(words)
            if code:
                how = f"has failed with exit code {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"
                raise CannotCompareError(f"the command {how} in its {directory.name} run", reason="command-failed")
        found = _compared_runs(*directories)
    if not found:
        raise CannotCompareError(
            "no training step was recorded", reason="nothing-recorded", hint="Does the command train with torch?"
        )
    if as_json:
        output.emit([one for _, one in found])
    else:
        for name, one in found:
            if len(found) > 1:
                output.show(f"{name}:")
            show(one)
    codes = {one["code"] for _, one in found}
    return DIFFERENT if DIFFERENT in codes else max(codes)


def _compared_runs(a: Path, b: Path) -> list[tuple[str, Parting]]:
    """Compare all trainings of two runs of a command: those of each rank in the order in which they began; return also their names."""
    from hookd.tool.cli.diff import compared
    from hookd.tool.fingerprints.comparison import DIFFERENT, EQUAL, NO_COMMON_STEP, Comparison

    runs = [_trainings(run) for run in (a, b)]
    found: list[tuple[str, Parting]] = []
    for rank in sorted({*runs[0], *runs[1]}):
        ours, theirs = (run.get(rank, []) for run in runs)
        pairs = list(zip_longest(ours, theirs))
        for number, (one, other) in enumerate(pairs, 1):
            name = f"rank {rank}" if len(pairs) == 1 else f"rank {rank}, training {number}"
            if one is not None and other is not None:
                result = compared(one[0], other[0])
                if result["code"] == EQUAL and one[1] != other[1]:
                    run, first, last = ("first" if one[1] > other[1] else "second", *sorted((one[1], other[1])))
                    sentence = f"{result['sentence'].rstrip('.')}; then only the {run} run goes on, to step {last}."
                    result = {**result, "code": DIFFERENT, "sentence": sentence, "step": first + 1}
                elif result["sentence"].startswith(NO_COMMON_STEP):
                    result = {**result, "advice": RESUMED}
                found.append((name, result))
            else:
                sentence = f"Only the {'second' if one is None else 'first'} run has this training ({name})."
                found.append((name, cast("Parting", asdict(Comparison(DIFFERENT, sentence)))))
    return found


def _trainings(run: Path) -> dict[int, list[tuple[Path, int]]]:
    """Return by rank the files of a run that have steps, in the order in which their recordings began, each with its last step."""
    from hookd.tool.cli.diff import wait
    from hookd.tool.fingerprints import file

    known: list[tuple[float, Path, int, int]] = []
    for path in run.iterdir():
        wait(path)
        about, steps = file.digests(path)
        if steps:
            known.append((about.get("began", 0.0), path, about.get("rank", 0), max(steps)))
    found: dict[int, list[tuple[Path, int]]] = {}
    for _, path, rank, last in sorted(known):
        found.setdefault(rank, []).append((path, last))
    return found
