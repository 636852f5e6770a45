"""`hookd replay BUNDLE`: repeat the module call that produced a bad value, in a new process with torch.

This process never imports torch. `hookd_capture.bundle.replay` does, in a process of the chosen interpreter, which gets only
those sources of hookd that an agent has.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hookd.errors import HookdError, UsageError
from hookd.tool.cli import options, output

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

NO_TORCH = 77
BOOT = f"""
import sys
root, request, answer, *more = sys.argv[1:]
sys.path[:] = [root, *more, *(entry for entry in sys.path if entry)]
import importlib.util
sys.dont_write_bytecode = True
if importlib.util.find_spec("torch") is None:
    sys.exit({NO_TORCH})
from hookd_capture.bundle.replay import main
main([request, answer])
"""
"""Run with `-c`. The current directory is importable only if an option allows imports."""
KINDS = {"nan": "NaN", "inf": "Inf"}


@click.command(short_help="Repeat the module call of a bundle, and compare the result.")
@click.argument("bundle", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--source", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
              help="The training script, if it defines classes of modules; its imports, classes and functions are run.")  # fmt: skip
@click.option("--allow-import", "allow", multiple=True, metavar="MODULE",
              help="Import classes from MODULE and its submodules, which runs their code; may be repeated.")  # fmt: skip
@click.option(
    "--python",
    default=sys.executable,
    metavar="PYTHON",
    help="A Python interpreter with the training's torch.  [default: hookd's own]",
)
@click.option(
    "--device", metavar="DEVICE", help="Device to run on.  [default: the recorded one if available, else cpu]"
)
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), default=300.0, show_default=True,
              metavar="S", help="Maximum time for the replay, in seconds.")  # fmt: skip
@options.json
def replay(
    *,
    bundle: Path,
    source: Path | None,
    allow: tuple[str, ...],
    python: str,
    device: str | None,
    timeout_s: float,
    as_json: bool,
) -> int:
    """Repeat the module call of a bundle, and find the operation that produced the first bad value.

    BUNDLE is a directory written by `-p nan:capture=true`; the incident names it. Reading it runs no code, and only
    module classes of torch.nn are used unless an option allows others. Exit code 0: the failure was reproduced; 1: it was
    not, or the call could not be made; 2: the bundle is broken, or an option is missing.
    """
    request = {"bundle": str(bundle.absolute()), "source": source and str(source), "allow": allow, "device": device}
    result = answer(request, python, timeout_s)
    if "error" in result:
        kind = UsageError if result["exit_code"] == UsageError.exit_code else HookdError
        raise kind(result["error"], reason=result["reason"], hint=result["hint"])
    if not result["is_reproduced"]:
        result["reason"] = "raised" if result["raised"] else "not-reproduced"
    if as_json:
        output.emit(result)
    else:
        show(result)
    return 0 if result["is_reproduced"] else 1


def answer(request: dict[str, Any], python: str, timeout_s: float) -> dict[str, Any]:
    """Run the replay in a new process, and return its result.

    Raises:
        HookdError: the process could not be started, took too long, or failed.
    """
    from hookd.tool.attach import payload

    with tempfile.TemporaryDirectory(prefix="hookd-replay-") as name:
        root = Path(name)
        payload.unpack("nan", root / "lib")
        asked, answered = root / "request.json", root / "answer.json"
        asked.write_text(json.dumps(request))
        more = [str(Path.cwd())] if request["allow"] or request["source"] else []
        words = [python, "-c", BOOT, str(root / "lib"), str(asked), str(answered), *more]
        try:
            done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                                  timeout=timeout_s, check=False)  # fmt: skip
        except OSError as error:
            raise UsageError(f"{python} cannot be started: {error.strerror}") from error
        except subprocess.TimeoutExpired as error:
            hint = "Allow more time with --timeout."
            raise HookdError(
                f"the replay did not finish within {timeout_s:g} s", reason="timeout", hint=hint
            ) from error
        if done.returncode == 0 and answered.exists():
            return dict(_clean(json.loads(answered.read_text())))
        raise _died(done, python)


def _clean(value: Any) -> Any:
    """Remove control characters from all text: a bundle is not trusted, and text is printed to a terminal."""
    if isinstance(value, str):
        return output.plain(value)
    if isinstance(value, dict):
        return {_clean(key): _clean(item) for key, item in value.items()}
    return [_clean(item) for item in value] if isinstance(value, list) else value


def _died(done: subprocess.CompletedProcess[str], python: str) -> HookdError:
    if done.returncode == NO_TORCH:
        hint = "Name the interpreter of the training's environment with --python."
        return UsageError(f"{python} has no torch", reason="no-torch", hint=hint)
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    how = f"status {done.returncode}" if done.returncode > 0 else signal.Signals(-done.returncode).name
    return HookdError(f"the process of the replay ended with {how}: {last}", reason="died")


def show(result: dict[str, Any]) -> None:
    """Print the result for a person."""
    made = result["made_by"]
    kind, where = KINDS.get(result["kind"], result["kind"]), result["where"]
    click.echo(
        output.wrap(
            f"{result['module']} ({result['class']}): {kind}, {where}, step {result['step']} of run {made.get('run')}"
        )
    )
    click.echo(
        output.wrap(
            f"recorded with torch {made.get('torch')}, called again with torch {result['torch']} on {result['device']}"
        )
    )
    click.echo()
    output.show(table(result))
    click.echo()
    for line in conclusion(result):
        click.echo(output.wrap(line))
    if result["first"] is not None:
        click.echo("\nstack of that operation, innermost line last:")
        for line in result["first"]["stack"]:
            click.echo(f"  {line}")


def table(result: dict[str, Any]) -> Table:
    """Return a table of the inputs, the outputs, and the recorded outputs."""
    rows = []
    for title, key in TITLES:
        for tensor in result[key]:
            shape = "x".join(map(str, tensor["shape"])) or "scalar"
            rows.append((f"{title} {tensor['name']}", shape, tensor["dtype"], *(str(tensor[n]) for n in COUNTS)))
    return output.fill(output.table("TENSOR", "SHAPE", "TYPE", ">ELEMENTS", ">NAN", ">INF"), rows)


TITLES = (
    ("input", "inputs"), ("bad", "parameters"), ("output", "outputs"), ("recorded", "recorded"),
    ("gradient of", "gradients"),
)  # fmt: skip
COUNTS = ("elements", "nan_count", "inf_count")


def conclusion(result: dict[str, Any]) -> Iterator[str]:
    """Yield lines that interpret the result."""
    for note in result["notes"]:
        yield f"note: {note}"
    if result["raised"]:
        yield f"the call raised {result['raised']}"
        yield "not reproduced"
        return
    first = result["first"]
    if first is not None:
        counts = f"{first['nan_count']} NaN and {first['inf_count']} Inf in {first['elements']}"
        yield f"first bad value: {first['operation']} in {first['module']}, {counts}; its inputs were good"
    if not result["is_output_known"]:
        yield "reproduced" if result["is_reproduced"] else "not reproduced"
        return
    same = "bit for bit what was recorded" if result["is_bit_equal"] else "not bit for bit what was recorded"
    if not result["is_bit_equal"] and not result["is_state_known"]:
        same += " (the state of the random number generators is not known)"
    yield f"{'reproduced' if result['is_reproduced'] else 'not reproduced'}; the output is {same}"
