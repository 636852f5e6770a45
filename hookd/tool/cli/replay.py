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
from typing import TYPE_CHECKING, Any, cast

import click

from hookd.errors import HookdError, PluginError, UsageError
from hookd.tool.cli import options, output

if TYPE_CHECKING:
    from hookd_capture.bundle.result import Answer, Request, Words

    from hookd.errors import ErrorAnswer

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

    BUNDLE is a directory written by `-p capture`; the incident names it. Reading it runs no code, and only
    module classes of torch.nn are used unless an option allows others. Exit code 0: the failure was reproduced; 1: it was
    not, or the call could not be made; 2: the bundle is broken, or an option is missing.
    """
    path = None if source is None else str(source)
    request: Request = {"bundle": str(bundle.absolute()), "source": path, "allow": [*allow], "device": device}
    result = answer(request, python, timeout_s)
    if "error" in result:
        kind = UsageError if result["exit_code"] == UsageError.exit_code else HookdError
        raise kind(result["error"], reason=result["reason"], hint=result["hint"])
    if not result["is_reproduced"]:
        result["reason"] = "raised" if result["raised"] else "not-reproduced"
    words = result.pop("words")
    if as_json:
        output.emit(result)
    else:
        show(words)
    return 0 if result["is_reproduced"] else 1


def answer(request: Request, python: str, timeout_s: float) -> Answer | ErrorAnswer:
    """Run the replay in a new process, and return its result.

    Raises:
        HookdError: the plugin `capture` is missing, or the process could not be started, took too long, or failed.
    """
    from hookd.tool.attach import payload

    with tempfile.TemporaryDirectory(prefix="hookd-replay-") as name:
        root = Path(name)
        try:
            payload.unpack("capture", root / "lib")
        except PluginError as error:
            hint = "It comes with hookd: install hookd again, with `pip install --force-reinstall hookd`."
            raise UsageError(
                "the plugin capture is not installed: it replays bundles", reason="unknown-plugin", hint=hint
            ) from error
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
            return cast("Answer | ErrorAnswer", dict(_clean(json.loads(answered.read_text()))))
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


def show(words: Words) -> None:
    """Print the result for a person."""
    for line in words["heading"]:
        click.echo(output.wrap(line))
    click.echo()
    output.show(output.fill(output.table("TENSOR", "SHAPE", "TYPE", ">ELEMENTS", ">NAN", ">INF"), words["rows"]))
    click.echo()
    for line in words["conclusion"]:
        click.echo(output.wrap(line))
    if words["stack"]:
        click.echo("\nstack of that operation, innermost line last:")
        for line in words["stack"]:
            click.echo(f"  {line}")
