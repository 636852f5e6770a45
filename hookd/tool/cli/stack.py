"""`hookd stack PID`: show where each thread of a target is, even if it hangs."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import click

from hookd.errors import HookdError
from hookd.tool.cli import options, output, targets
from hookd.wire.stack import Stacks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookd.wire.stack import Beat, Frame, StackedThread, Way

MOST_FRAMES = 25
"""Frames shown of each thread; `--json` prints all."""
DAEMON_S = 2.0
"""Timeout of the request to the daemon for the time since the last event."""


class ShownStacks(Stacks):
    """The threads of a target, as `--json` prints them."""

    silent_s: float | None
    """Seconds since the last event; None if nobody has watched."""


@click.command(short_help="Show where each thread of a target is.")
@click.argument("pid", type=options.Pid())
@click.option("--native", "with_native", is_flag=True,
              help="Also show frames of C and C++ (py-spy); the process is stopped while they are read.")  # fmt: skip
@click.option("--blocking", is_flag=True,
              help="Let py-spy stop the process briefly, instead of reading while it runs.")  # fmt: skip
@options.host
@options.json
def stack(*, pid: int, with_native: bool, blocking: bool, host: str | None, as_json: bool) -> None:
    """Show where each thread of a target is: module, step, Python and native stack.

    This works within seconds, even if the target is stopped or hangs in a collective. The modules are read from the
    target's page. The Python stacks come from its agent or, if that does not answer, from py-spy, if installed
    (pip install 'hookd[stack]').
    """
    from hookd.tool.attach.stack import stack as look

    stacks = look(pid, with_native=with_native, blocking=blocking)
    result: ShownStacks = {**stacks, "silent_s": _silent_s(pid, host)}
    if as_json:
        output.emit(result)
        return
    for line in _lines(result):
        click.echo(line)


def _silent_s(pid: int, host: str | None) -> float | None:
    """Return the seconds since the last event, None if nobody knows.

    The daemon or the foreground attach that serves the target knows, because it watches all the time.
    """
    with contextlib.suppress(HookdError):
        age = targets.report(pid, targets.daemon(host, DAEMON_S)).get("target", {}).get("heartbeat_age_s")
        return float(age) if isinstance(age, (int, float)) else None
    return None


def _lines(result: ShownStacks) -> Iterator[str]:
    identity = result["identity"]
    script, run, rank = (output.plain(str(identity.get(key))) for key in ("script", "run", "rank"))
    still = f": {result['state']}" if result["state"] in ("stopped", "traced", "ended") else ""
    yield output.wrap(f"{script}: run {run}, rank {rank}, process {result['pid']}{still}")
    if progress := ", ".join(_progress(result)):
        yield output.wrap(progress)
    for thread in result["threads"]:
        yield ""
        yield from _thread(thread, result)
    yield ""
    for what, way in result["ways"].items():
        yield output.wrap(f"{what:7} {_way(way)}", " " * 8)


def _progress(result: ShownStacks) -> Iterator[str]:
    if result["last_step_s"] is not None:
        yield f"the last step ended {output.seconds(result['last_step_s'])} ago"
    if result["silent_s"] is not None:
        yield f"the last event was {output.seconds(result['silent_s'])} ago"


def _thread(thread: StackedThread, result: ShownStacks) -> Iterator[str]:
    kernel = thread["kernel"]
    where = (
        f"{kernel['state']}{' in ' + output.plain(kernel['where']) if kernel['where'] else ''}" if kernel else "gone"
    )
    yield output.wrap(f"thread {thread['tid'] or '?'} {output.plain(thread['name'])}: {where}")
    if (beat := thread["beat"]) is not None:
        yield output.wrap("  " + _beat(beat, result["watched_s"]), "    ")
        if len(beat["modules"]) > 1:
            yield output.wrap("  modules: " + " > ".join(map(output.plain, beat["modules"])), "    ")
    own = sum(frame["own"] for frame in thread["frames"])
    shown = [frame for frame in thread["frames"] if not frame["own"]]
    for frame in shown[:MOST_FRAMES]:
        yield _frame(frame)
    more = len(shown[MOST_FRAMES:]) + thread["left_out"]
    if more or own:
        omitted = [f"{more} more" if more else "", f"{own} of hookd" if own else ""]
        yield f"    ({' and '.join(filter(None, omitted))} left out)"


def _beat(beat: Beat, watched_s: float) -> str:
    module = f" of {output.plain(beat['module'])} ({output.plain(beat['type'] or '')})" if beat["module"] else ""
    moves = "moving" if beat["moves"] else f"no event within {watched_s:.1f} s"
    return f"{beat['phase']}{module}, step {beat['step']}, {moves}"


def _frame(frame: Frame) -> str:
    function, file = output.plain(frame["function"]), output.plain(frame["file"])
    place = f"{file}:{frame['line']}" if frame["line"] else file
    room = output.columns() - 6
    left = output.shorten(function, max(room // 2, room - len(place)))
    room -= len(left)
    return f"    {left}  {place if len(place) <= room else '…' + place[1 - room :]}"  # the end of a path is its most useful part


def _way(way: Way) -> str:
    text = f"from {way['by']}" if way["by"] else "not available"
    if way["seconds"]:
        text += f" ({output.seconds(way['seconds'])})"
    return text + (f": {output.plain(way['problem'])}" if way["problem"] else "")
