"""`hookd demo`: attach to, observe and detach from an ordinary training script, live.

The demo works as a user would: the script is a separate process, and hookd runs from the command line.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from hookd.errors import UsageError
from hookd.tool.cli import output
from hookd.tool.cli.program import PATIENCE_S, Program, require, started, until

if TYPE_CHECKING:
    import re

    from hookd.tool.cli.outputs import Detaches
    from hookd.wire.answer import Attached, DetachedTarget
    from hookd.wire.incident import Incident
    from hookd.wire.report import Report

HOOKD = (sys.executable, "-m", "hookd")
SHOWN = ("hookd_target_up", "hookd_steps_total", "hookd_timing_forward_seconds_total", "hookd_activations_std")
"""Metric families of which the demo shows one line."""


@click.command(short_help="Attach to a live training, watch its first NaN appear, detach.")
@click.option(
    "--python",
    type=click.Path(exists=True, dir_okay=False),
    help="Train with this interpreter.  [default: hookd's own]",
)
def demo(*, python: str | None) -> None:
    """Attach to a live training process, watch its first NaN appear, and detach. Takes half a minute."""
    if python is None and importlib.util.find_spec("torch") is None:
        raise UsageError(
            "the demo trains a model, and there is no torch here",
            hint="pip install 'hookd[torch]', or hookd demo --python INTERPRETER",
        )
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hookd-demo-") as directory, contextlib.ExitStack() as stack:
        Play(str(Path(python or sys.executable).absolute()), Path(directory), stack).perform()
    me = command()
    click.echo(f"\nDone in {time.monotonic() - began:.0f} s. Next: {me} ps, {me} attach PID, {me} doctor.")


def command() -> str:
    """Return the command that starts this hookd: its name if PATH leads to it, else its path."""
    script = Path(sys.argv[0])
    if script.name != "hookd" or not script.exists():
        return shlex.join([sys.executable, "-m", "hookd"])
    on_path = shutil.which("hookd")
    if on_path is not None and script.samefile(on_path):
        return "hookd"
    path = script.absolute()
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


def script() -> Path:
    """Find the training script: packed into the wheel, or beside the package in its source tree."""
    package = Path(__file__).parents[2]
    packed = package / "examples" / "train.py"
    return packed if packed.exists() else package.parent / "examples" / "train.py"


class Play:
    """The demo, scene by scene.

    Args:
        python: the interpreter that trains.
        directory: where the output of the processes goes.
        stack: ends the processes.
    """

    def __init__(self, python: str, directory: Path, stack: contextlib.ExitStack) -> None:
        self._python = python
        self._directory = directory
        self._stack = stack

    def perform(self) -> None:
        """Play all scenes.

        Raises:
            HookdError: something was not as it should be.
        """
        training = self._train()
        watching, metrics = self._attach(training)
        self._report(training)
        self._scrape(metrics)
        fault = self._break(training)
        self._detach(training, watching)
        self._prove(training, fault)

    def _train(self) -> Program:
        _title(1, "An ordinary training script, a process of its own", f"python examples/{script().name}")
        training = self._start("training", [self._python, str(script())])
        line = training.line(r"^step 10 ", "the tenth step")
        _note(f"process {training.pid}, at {line.string}; it knows nothing of hookd")
        return training

    def _attach(self, training: Program) -> tuple[Program, str]:
        # The steps of a toy model are so short that sampling each of them exceeds the budget of 1 %, and hookd would
        # sample fewer. That finds every lasting fault, but the fault of the demo lasts for one step.
        _title(2, "Attach to it, live", f"HOOKD_BUDGET=1 hookd attach {training.pid}")
        words = [*HOOKD, "attach", str(training.pid), "--listen", "127.0.0.1:0", "--json"]
        watching = self._start("attach", words, HOOKD_BUDGET="1")
        answer = watching.answer()
        target = answer["targets"][0]
        require("error" not in target, f"an attach ({target.get('error')})")
        attached = cast("Attached", target)
        pause, wall = output.seconds(attached["pause_s"]), output.seconds(attached["wall_s"])
        _note(f"attached by {attached['method']}: training paused for {pause}, ready after {wall}")
        return watching, answer["metrics"]

    def _report(self, training: Program) -> None:
        _title(3, "What it does, layer by layer", f"hookd report {training.pid} --modules 14")
        training.more_lines(40)
        for line in _said("report", str(training.pid), "--modules", "14").splitlines():
            _note(line)

    def _scrape(self, url: str) -> None:
        _title(4, "The same for Prometheus", f"curl {url}")
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:  # noqa: S310  (our own http address)
            lines = answer.read().decode().splitlines()
        series = [line for line in lines if not line.startswith("#")]
        for family in SHOWN:
            _note(next((line for line in series if line.startswith(family)), f"(no {family} yet)"))
        _note(f"… and {len(series) - len(SHOWN)} more")

    def _break(self, training: Program) -> re.Match[str]:
        _title(5, "Now one layer goes wrong, for one step", f"kill -USR1 {training.pid}")
        training.signal(signal.SIGUSR1)
        fault = training.line(r"^fault in (\S+) at step (\d+)$", "the fault")
        loss = training.line(rf"^step {fault[2]} loss nan", "the loss of the faulty step")
        _note(f"the script:  {fault[0]}; {loss[0]}")
        incident = until(lambda: _first_nan(training.pid), "hookd's report of the NaN")
        _note(f"hookd:       {incident['message']}")
        module = incident["module"]
        require(module == fault[1], f"the layer that made the NaN, {fault[1]}, not {module}")
        return fault

    def _detach(self, training: Program, watching: Program) -> None:
        _title(6, "Detach", f"hookd detach {training.pid}")
        answers: Detaches = json.loads(_said("detach", str(training.pid), "--json"))
        answer = cast("DetachedTarget", answers["targets"][0])
        require(answer["restored"] == "identity", f"the original __call__, not {answer['restored']}")
        left = f"what stays: {', '.join(answer['residue'])}" if answer["residue"] else "nothing is left behind"
        _note(f"the process says: nn.Module.__call__ is the original object again; {left}")
        watching.signal(signal.SIGINT)
        require(watching.wait("the end of `hookd attach`") == 0, "`hookd attach` to end in order")

    def _prove(self, training: Program, fault: re.Match[str]) -> None:
        _title(7, "It trained on, unharmed")
        _note(f"after the detach: {training.more_lines(1)}; a while later: {training.more_lines(20)}")
        training.signal(signal.SIGTERM)
        steps, watched = training.line(r"^done (\d+) (\w+)$", "the end of the training").groups()
        again = [self._python, str(script()), "--steps", steps, "--nan-at", fault[2]]
        whole_run = f"the same {steps} steps in a run never watched"
        never_watched = self._start("again", again).line(r"^done (\d+) (\w+)$", whole_run)[2]
        _note(f"all its weights, SHA-256:                    {watched[:40]}…")
        _note(f"the same {steps} steps in a run never watched:  {never_watched[:40]}…")
        require(never_watched == watched, "the same weights, bit for bit")
        _note("identical, bit for bit")

    def _start(self, name: str, words: list[str], **variables: str) -> Program:
        return self._stack.enter_context(started(words, self._directory / name, **variables))


def _said(*words: str) -> str:
    """Run a hookd command and return its stdout."""
    done = subprocess.run([*HOOKD, *words], capture_output=True, text=True, check=False)
    require(done.returncode == 0, f"`hookd {' '.join(words)}` to succeed\n{done.stderr}")
    return done.stdout


def _first_nan(pid: int) -> Incident | None:
    report: Report = json.loads(_said("report", str(pid), "--json"))
    return next((incident for incident in report["incidents"] if incident.get("plugin") == "nan"), None)


def _title(number: int, text: str, command: str = "") -> None:
    click.echo()
    click.secho(f"{number}. {text}", bold=True)
    if command:
        click.secho(f"   $ {command}", dim=True)


def _note(text: str) -> None:
    click.echo(f"   {text}")
