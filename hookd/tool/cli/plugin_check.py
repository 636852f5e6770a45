"""`hookd plugin check` and `hookd plugin bench`: find problems in a plugin, and measure its cost.

A plugin for targets is run by a Python with torch, a daemon plugin by the Python that runs hookd.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

import click

from hookd.errors import HookdError, PluginError
from hookd.tool.cli import options, output, trial

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hookd.testing.trials import (
        BenchAnswer,
        Benched,
        Bounds,
        CheckAnswer,
        HookCost,
        PlacedRefusal,
        Refusal,
        RehearsalAnswer,
        RehearsalRequest,
        TrialRequest,
        TriedPlugin,
    )
    from hookd.tool.check.imports import NotPython
    from hookd.tool.check.problem import Problem
    from hookd.tool.check.report import CheckReport
    from hookd.tool.check.source import Subject
    from hookd.tool.cli.outputs import BenchRows, PluginReports

TIMEOUT_S = 300
PATH = click.argument("path", metavar="PATH")
PYTHON = click.option(
    "--python",
    metavar="PROGRAM",
    default=sys.executable,
    help="A Python interpreter with torch.  [default: hookd's own]",
)
SETTINGS = click.option(
    "-o", "--option", "settings", metavar="KEY=VALUE", multiple=True, help="An option of the plugin."
)


@click.command()
@PATH
@PYTHON
@SETTINGS
@click.option("--daemon-option", "daemon_settings", metavar="KEY=VALUE", multiple=True,
              help="An option of the daemon plugin.")  # fmt: skip
@click.option("--static", is_flag=True, help="Check the source only; run nothing.")
@options.json
def check(
    *, path: str, python: str, settings: tuple[str, ...], daemon_settings: tuple[str, ...], static: bool, as_json: bool
) -> int:
    """Check a plugin, and report each problem with its place and a fix.

    PATH is a file, a folder, or the name of an installed plugin. The source is analyzed, and a small model is trained with
    the plugin and without it. A daemon plugin is run once, with simulated ranks that join and leave. This runs the
    plugin's code with your rights: use --static for code that you do not trust. Exit code 1: problems were found.
    """
    from hookd.tool.check import source

    unread: list[NotPython] = []
    subjects = source.subjects(path, unread)
    reports = [_read(subject, subjects) for subject in subjects]
    broken = [_broken(error) for error in unread]
    sound = [subject for subject, report in zip(subjects, reports, strict=True) if report.is_good]
    chosen, daemon_chosen = _options(settings), _options(daemon_settings)
    try:
        targets = [subject for subject in sound if subject.side == "target" and not static]
        ran = cast(
            "dict[str, CheckAnswer | PlacedRefusal]", _run_trials(targets, "check", python, chosen) if targets else {}
        )
        for subject, report in zip(subjects, reports, strict=True):
            if subject.entry in ran:
                _add_run(report, subject, ran[subject.entry])
            elif subject in sound and subject.side == "daemon" and not static:
                _add_rehearsal(report, subject, _rehearse(subject, daemon_chosen))
    except HookdError:  # such as a trial that hangs: the problems found in the source are reported all the same
        if not as_json:
            for report in [*broken, *reports]:
                _show_problems(report)
        raise
    reports = [*broken, *reports]
    is_good = all(report.is_good for report in reports)
    if as_json:
        data: PluginReports = {"plugins": [report.as_json() for report in reports], "ok": is_good}
        output.emit(data)
    else:
        for report in reports:
            _show(report)
    return 0 if is_good else 1


class BenchRow(TypedDict):
    """The cost of a plugin, as `hookd plugin bench --json` prints it."""

    plugin: str
    """Its name."""
    models: dict[str, Benched]
    """By name of the model."""


@click.command()
@PATH
@PYTHON
@SETTINGS
@options.json
def bench(*, path: str, python: str, settings: tuple[str, ...], as_json: bool) -> int:
    """Measure the cost of each hook of a plugin.

    It is measured on a model of 200 small modules and on a transformer block. PATH is as for `hookd plugin check`.
    """
    from hookd.tool.check import source

    rows: list[BenchRow] = []
    subjects = [subject for subject in source.subjects(path) if subject.side == "target"]
    if not subjects:
        raise PluginError(
            f"there is no plugin for targets in {path}", hint="A daemon plugin costs the training nothing."
        )
    ran = cast("dict[str, BenchAnswer | Refusal]", _run_trials(subjects, "bench", python, _options(settings)))
    for subject in subjects:
        measured = ran[subject.entry]
        if "refused" in measured:
            raise PluginError(measured["refused"], hint=measured["hint"])
        rows.append({"plugin": subject.name, "models": measured["models"]})
    if as_json:
        data: BenchRows = {"plugins": rows}
        output.emit(data)
    else:
        for row in rows:
            _show_bench(row)
    return 0


def _options(settings: tuple[str, ...]) -> dict[str, str]:
    for text in settings:
        if "=" not in text:
            raise click.UsageError(f"Write an option as KEY=VALUE, not as {text!r}.")
    return dict(text.split("=", 1) for text in settings)


def require_sound(names: Iterable[str], plugin_dirs: tuple[Path, ...]) -> None:
    """Raise if the source of a plugin has problems that `hookd plugin check` finds without running it.

    Plugins that come with hookd are not checked, nor are those that only the daemon or the target's environment has.

    Raises:
        PluginError: reason "faulty".
    """
    from hookd.tool.attach import sources
    from hookd.tool.check import rules

    for name in names:
        try:
            found = sources.find(name, plugin_dirs)
        except PluginError:  # whoever loads it says so
            continue
        if found.origin != "hookd":
            rules.require_sound(name, found.origin if found.tag else "")


def _read(subject: Subject, all_subjects: Sequence[Subject]) -> CheckReport:
    """Return the report on a plugin's source; the plugin is not run."""
    from hookd.tool.check import rules, types
    from hookd.tool.check.report import CheckReport

    problems = rules.problems(subject, all_subjects)
    report = CheckReport(subject.name, subject.side, str(subject.file), types.is_possible(), problems)
    if report.is_typed and report.is_good:
        _progress(f"{subject.name or subject.class_name}: checking types with mypy")
        report.add(types.problems(subject))
    return report


def _broken(error: NotPython) -> CheckReport:
    """Return the report on a file that is not valid Python, so that no plugin can be found in it."""
    from hookd.tool.check.problem import Problem
    from hookd.tool.check.report import CheckReport

    problem = Problem(str(error.file), error.line, "source", f"not valid Python: {error.why}")
    return CheckReport("", "target", str(error.file), is_typed=False, problems=[problem])


def _add_run(report: CheckReport, subject: Subject, ran: CheckAnswer | PlacedRefusal) -> None:
    report.add(_trial_problems(subject, ran))
    report.is_run, report.mutates = True, False
    if "refused" not in ran:
        report.mutates, report.hooks, report.uncalled = ran["mutates"], ran["hooks"], ran["uncalled"]


def _add_rehearsal(report: CheckReport, subject: Subject, ran: RehearsalAnswer | Refusal) -> None:
    report.add(_rehearsal_problems(subject, ran, report.problems))
    report.is_run, report.daemon_hooks = True, [] if "refused" in ran else ran["hooks"]


def _rehearsal_problems(
    subject: Subject, ran: RehearsalAnswer | Refusal, already_known: Sequence[Problem]
) -> list[Problem]:
    """Return the problems found when a daemon plugin was run, without those already found."""
    from hookd.tool.check import names
    from hookd.tool.check.problem import Problem

    file, line = str(subject.file), subject.tree.lineno
    if "refused" in ran:
        fix = "" if "cannot be imported" in ran["refused"] else "set required options with --daemon-option KEY=VALUE"
        return [Problem(file, line, "refused", ran["refused"], fix)]
    problems = [
        Problem(error["file"] or file, error["line"] or line, "raised", f"{error['hook']}: {error['text']}")
        for error in ran["raised"]
    ]
    known = {problem.message for problem in already_known}
    for metric in ran["metrics"]:
        problems += names.lint(
            metric["kind"], metric["name"], metric["help"], metric["labels"], file=file, line=line, side="daemon"
        )
    return [problem for problem in problems if problem.message not in known]


def _progress(message: str) -> None:
    """Print the current activity, if stderr is a terminal."""
    if sys.stderr.isatty():
        output.say(f"... {message}")


def _trial_problems(subject: Subject, ran: CheckAnswer | PlacedRefusal) -> list[Problem]:
    """Return the problems found when a model was trained with a plugin."""
    from hookd.tool.check import names
    from hookd.tool.check.problem import Problem

    file, line = str(subject.file), subject.tree.lineno
    if "refused" in ran:
        return [Problem(ran.get("file") or file, ran.get("line") or line, "refused", ran["refused"], ran["hint"])]
    problems = [
        Problem(error["file"] or file, error["line"] or line, "raised", f"{error['hook']} raised {error['error']}")
        for error in ran["raised"]
    ]
    if ran["errors"] and not problems:
        problems.append(Problem(file, line, "raised", ran["logs"][-1] if ran["logs"] else "a hook raised an exception"))
    fix = "an observer must change nothing: no in-place operations, no random numbers; see docs/plugins.md"
    if ran["broken"]:
        problems.append(Problem(file, line, "changed", f"the training fails with the plugin: {ran['broken']}", fix))
    if ran["difference"]:
        problems.append(Problem(file, line, "changed", f"the plugin changes the training: {ran['difference']}", fix))
    for metric in ran["metrics"]:
        name = metric["name"].removeprefix(f"hookd_{subject.name}_")
        problems += names.lint(metric["kind"], name, _HELP, metric["labels"], file=metric["file"], line=metric["line"])
    return problems


def _rehearse(subject: Subject, chosen: Mapping[str, str]) -> RehearsalAnswer | Refusal:
    """Run a daemon plugin once, in a new process of the Python that runs hookd, as the daemon would.

    Raises:
        HookdError: the process ended without an answer.
    """
    _progress(f"running {subject.name} in a simulated daemon")
    with tempfile.TemporaryDirectory() as home:
        out = Path(home, "answer.json")
        request: RehearsalRequest = {
            "name": subject.name, "files": [str(file) for file in subject.files], "options": chosen,
            "entry": subject.entry, "directory": str(subject.directory), "out": str(out),
        }  # fmt: skip
        status, stderr = _script(sys.executable, Path(home), _REHEARSAL, request, TIMEOUT_S)
        if not out.exists():
            raise _unanswered(status, stderr)
        return cast("RehearsalAnswer | Refusal", _answer(out))


def _run_trials(subjects: list[Subject], what: str, python: str, chosen: Mapping[str, str]) -> dict[str, object]:
    """Train with each plugin in a process of another Python, and return the results by `entry`.

    That Python needs torch and nothing else.

    Raises:
        HookdError: reason "no-torch"; or the process ended without an answer.
    """
    from hookd.tool.attach import payload

    _progress(f"training a small model with and without {', '.join(subject.name for subject in subjects)}")
    with tempfile.TemporaryDirectory() as home:
        payload.unpack_testing(Path(home))
        outs = {subject.entry: Path(home, f"answer{at}.json") for at, subject in enumerate(subjects)}
        plugins: list[TriedPlugin] = [
            {"entry": subject.entry, "directory": str(subject.directory), "out": str(outs[subject.entry])}
            for subject in subjects
        ]
        request: TrialRequest = {"what": what, "options": chosen, "plugins": plugins}
        status, stderr = _script(python, Path(home), _TRIAL, request, TIMEOUT_S * len(subjects))
        if all(out.exists() for out in outs.values()):
            return {entry: _answer(out) for entry, out in outs.items()}
    if status == _NO_TORCH:
        hint = "Name an interpreter that has it (--python /path/to/python), or check the source only (--static)."
        raise HookdError(f"{python} has no torch, so no trial training can run", reason="no-torch", hint=hint)
    raise _unanswered(status, stderr)


def _answer(out: Path) -> dict[str, object]:
    """Read the answer that a trial has written.

    Raises:
        HookdError: the file is not an answer; the plugin's code can write to it as well.
    """
    from hookd.tool.attach.trusted import ANYBODY

    try:
        return dict(json.loads(ANYBODY.read(out)))
    except (PluginError, ValueError, TypeError, RecursionError) as error:
        raise HookdError(
            "the trial's answer is malformed", hint="The plugin's code may have overwritten it: check that code."
        ) from error


def _unanswered(status: int, stderr: str) -> HookdError:
    return HookdError(stderr.strip()[-2000:] or f"the trial ended with exit code {status}, without an answer")


def _script(
    python: str, home: Path, main: str, request: TrialRequest | RehearsalRequest, timeout_s: float
) -> tuple[int, str]:
    """Run source code as a script, and return its exit code and the end of its stderr."""
    script = home / "trial.py"  # Python puts the script's folder first on sys.path, not the current directory
    script.write_text(main)
    return trial.finished([python, str(script), json.dumps(request)], timeout_s)


_HELP = "x"
"""Stands for the help of a metric, which was checked in the source already."""
_NO_TORCH = 79
_TRIAL = f"""
import importlib.util, sys
if importlib.util.find_spec("torch") is None: sys.exit({_NO_TORCH})
from hookd.testing.measure import main
main()
"""
_REHEARSAL = f"""
import sys
sys.path.insert(1, {str(Path(__file__).parents[3])!r})
from hookd.testing.rehearsal import main
main()
"""


def _show(report: CheckReport) -> None:
    """Print the problems, and the cost of each hook."""
    _show_problems(report)
    _show_run(report)


def _show_problems(report: CheckReport) -> None:
    """Print the problems as a compiler does."""
    here = Path.cwd()
    for problem in report.problems:
        file = Path(problem.file)
        short = file.relative_to(here) if file.is_relative_to(here) else file
        where = f"{short}:{problem.line}" if problem.line else str(short)
        kind = "warning" if problem.is_warning else "error"
        click.echo(output.plain(f"{where}: {kind}: {problem.message} [{problem.rule}]", lines=True))
        if problem.fix:
            click.echo(output.plain(f"    {problem.fix}", lines=True))


def _show_run(report: CheckReport) -> None:
    rows = [(hook, str(cost["calls"]), _ns(cost)) for hook, cost in report.hooks.items()]
    if rows:
        output.show(output.fill(output.table("HOOK", ">CALLS", ">PER CALL"), rows))
    if report.uncalled:
        hooks = ", ".join(report.uncalled)
        output.say(f"{report.plugin}: the models of the trial never called {hooks}: test it with a model of your own")
    if report.is_good:
        ran = f"; {_rehearsed(report) if report.side == 'daemon' else _trained(report)}" if report.is_run else ""
        typed = "" if report.is_typed else "; types were not checked (pip install mypy)"
        output.say(f"{_titled(report)}: no problems found{ran}{typed}")
    elif not report.is_run:
        skipped = "no trial training was run" if report.side == "target" else "it was not run in a daemon"
        output.say(f"{_titled(report)}: {skipped}; fix these problems first")


def _titled(report: CheckReport) -> str:
    name = report.plugin or Path(report.file).name
    return f"{name}, in the daemon" if report.side == "daemon" else name


def _rehearsed(report: CheckReport) -> str:
    return (
        f"tested with simulated ranks joining and leaving ({', '.join(report.daemon_hooks or ()) or 'it has no hooks'})"
    )


def _trained(report: CheckReport) -> str:
    return (
        "it changes the training, as it declares" if report.mutates else "the training is bit for bit the same with it"
    )


def _ns(cost: HookCost) -> str:
    return f"{output.seconds(cost['ns'] / 1e9)} ({output.seconds(cost['low_ns'] / 1e9)} to {output.seconds(cost['high_ns'] / 1e9)})"


def _show_bench(row: BenchRow) -> None:
    for model, measured in row["models"].items():
        table = output.table(
            "HOOK", ">CALLS", ">PER CALL", ">PEAK BYTES", ">KEPT BYTES", title=f"{row['plugin']} on {model}"
        )
        rows = [
            (hook, str(cost["calls"]), _ns(cost), f"{cost['peak_bytes']:.0f}", f"{cost['kept_bytes']:.0f}")
            for hook, cost in measured["hooks"].items()
        ]
        ratio, control = _bounds(measured["ratio"]), _bounds(measured["control"])
        output.show(
            output.fill(table, rows),
            f"a step takes {ratio} times as long with the plugin; two runs without it: {control} (control)\n",
        )


def _bounds(interval: Bounds) -> str:
    return f"{interval['median']:.3f} ({interval['low']:.3f} to {interval['high']:.3f})"
