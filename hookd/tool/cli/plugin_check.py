"""`hookd plugin check` and `hookd plugin bench`: what an author should mend, and what the plugin costs.

The half for targets is run by a Python with torch, the half for the daemon by the one that runs hookd.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hookd.errors import HookdError, PluginError
from hookd.tool.cli import options, output, trial

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hookd.tool.check.imports import NotPython
    from hookd.tool.check.problem import Problem
    from hookd.tool.check.source import Subject

TIMEOUT_S = 300
PATH = click.argument("path", metavar="PATH")
PYTHON = click.option(
    "--python", metavar="PROGRAM", default=sys.executable, help="A Python that has torch; by default hookd's own."
)
SETTINGS = click.option(
    "-o", "--option", "settings", metavar="KEY=VALUE", multiple=True, help="An option of the plugin."
)


@click.command()
@PATH
@PYTHON
@SETTINGS
@click.option("--daemon-option", "daemon_settings", metavar="KEY=VALUE", multiple=True,
              help="An option of the plugin's half in the daemon.")  # fmt: skip
@click.option("--static", is_flag=True, help="Look at the source only; nothing is run.")
@options.json
def check(
    *, path: str, python: str, settings: tuple[str, ...], daemon_settings: tuple[str, ...], static: bool, as_json: bool
) -> int:
    """Say what is wrong with a plugin, where, and what to do: a file, a folder, or an installed name.

    Its source is read, and a small model is trained with it and without it; a half for the daemon is hosted once, with
    ranks that come and go. That runs the plugin's code with your rights: use --static for code that you do not trust.
    Exit code 1: something is wrong.
    """
    from hookd.tool.check import source

    unread: list[NotPython] = []
    found = source.subjects(path, unread)
    reports = [_read(subject, found) for subject in found]
    broken = [_broken(error) for error in unread]
    sound = [one for one, report in zip(found, reports, strict=True) if all(it.is_warning for it in report["problems"])]
    chosen, daemon_chosen = _options(settings), _options(daemon_settings)
    try:
        targets = [one for one in sound if one.half == "target" and not static]
        ran = _run(targets, "check", python, chosen) if targets else {}
        for subject, report in zip(found, reports, strict=True):
            if subject.entry in ran:
                _add_run(report, subject, ran[subject.entry])
            elif subject in sound and subject.half == "daemon" and not static:
                _add_rehearsal(report, subject, _rehearse(subject, daemon_chosen))
    except HookdError:  # a trial that hangs, say: what was found without it is told all the same
        if not as_json:
            for report in [*broken, *reports]:
                _show_found(report)
        raise
    reports = [*broken, *reports]
    is_good = all(one.is_warning for report in reports for one in report["problems"])
    if as_json:
        told = [{**one, "problems": [problem.as_json() for problem in one["problems"]]} for one in reports]
        output.emit({"plugins": told, "ok": is_good})
    else:
        for report in reports:
            _show(report)
    return 0 if is_good else 1


@click.command()
@PATH
@PYTHON
@SETTINGS
@options.json
def bench(*, path: str, python: str, settings: tuple[str, ...], as_json: bool) -> int:
    """Measure what each hook of a plugin costs, on a model of 200 small modules and on a transformer block."""
    from hookd.tool.check import source

    reports = []
    subjects = [one for one in source.subjects(path) if one.half == "target"]
    if not subjects:
        raise PluginError(
            f"there is no plugin for targets in {path}", hint="What runs in the daemon costs a training nothing."
        )
    ran = _run(subjects, "bench", python, _options(settings))
    for subject in subjects:
        found = ran[subject.entry]
        if "refused" in found:
            raise PluginError(found["refused"], hint=found["hint"])
        reports.append({"plugin": subject.name, **found})
    if as_json:
        output.emit({"plugins": reports})
    else:
        for report in reports:
            _show_bench(report)
    return 0


def _options(settings: tuple[str, ...]) -> dict[str, str]:
    for text in settings:
        if "=" not in text:
            raise click.UsageError(f"An option is written KEY=VALUE, not {text!r}.")
    return dict(text.split("=", 1) for text in settings)


def _read(subject: Subject, beside: Sequence[Subject]) -> dict[str, Any]:
    """Say what is wrong with the source."""
    from hookd.tool.check import types
    from hookd.tool.check.problem import Problem

    try:
        found = _by_text(subject, beside)
    except RecursionError:
        why = "its code is nested too deeply to be checked"
        found = [Problem(str(subject.file), subject.tree.lineno, "source", why, "split the expression")]
    report: dict[str, Any] = {
        "plugin": subject.name, "half": subject.half, "file": str(subject.file), "hooks": {}, "uncalled": [], "is_run": False,
    }  # fmt: skip
    report["is_typed"] = types.is_possible()
    if report["is_typed"] and all(one.is_warning for one in found):
        _progress(f"{subject.name or subject.class_name}: mypy looks at the types")
        found += types.problems(subject)
    return {**report, "problems": sorted(set(found))}


def _by_text(subject: Subject, beside: Sequence[Subject]) -> list[Problem]:
    from hookd.tool.check import attributes, blocking, names, packaging, signatures

    found = [*signatures.problems(subject), *packaging.problems(subject)]
    if subject.half == "target":
        found += [*blocking.problems(subject), *attributes.problems(subject)]
    else:
        others = (one for one in beside if one.half == "target" and one.name == subject.name)
        found += (problem for other in others for problem in names.twice(subject, other))
    found += [one for file in subject.files for one in names.declared(file, subject.half)]
    return found


def _broken(error: NotPython) -> dict[str, Any]:
    """Report a file in which no plugin can be found."""
    from hookd.tool.check.problem import Problem

    problem = Problem(str(error.file), error.line, "source", f"not valid Python: {error.why}")
    return {
        "plugin": "", "half": "target", "file": str(error.file), "hooks": {}, "uncalled": [], "is_run": False,
        "is_typed": False, "problems": [problem],
    }  # fmt: skip


def _add_run(report: dict[str, Any], subject: Subject, ran: dict[str, Any]) -> None:
    report["problems"] = sorted({*report["problems"], *_of_run(subject, ran)})
    report |= {"is_run": True, "mutates": ran.get("mutates", False)}
    report |= {"hooks": ran.get("hooks", {}), "uncalled": ran.get("uncalled", [])}


def _add_rehearsal(report: dict[str, Any], subject: Subject, ran: dict[str, Any]) -> None:
    report["problems"] = sorted({*report["problems"], *_of_rehearsal(subject, ran, report["problems"])})
    report |= {"is_run": True, "hosted": ran.get("hooks", [])}


def _of_rehearsal(subject: Subject, ran: dict[str, Any], found: list[Problem]) -> list[Problem]:
    """Say what came out of hosting it."""
    from hookd.tool.check import names
    from hookd.tool.check.problem import Problem

    file, line = str(subject.file), subject.tree.lineno
    if "refused" in ran:
        fix = "" if "cannot be imported" in ran["refused"] else "what it needs is given by --daemon-option KEY=VALUE"
        return [Problem(file, line, "refused", ran["refused"], fix)]
    told = [
        Problem(one["file"] or file, one["line"] or line, "raised", f"{one['hook']}: {one['text']}")
        for one in ran["raised"]
    ]
    known = {one.message for one in found}
    for one in ran["metrics"]:
        told += names.lint(one["kind"], one["name"], one["help"], one["labels"], file=file, line=line, half="daemon")
    return [one for one in told if one.message not in known]


def _progress(message: str) -> None:
    """Say to a person who waits what is being done."""
    if sys.stderr.isatty():
        output.say(f"... {message}")


def _of_run(subject: Subject, ran: dict[str, Any]) -> list[Problem]:
    """Say what came out of training with it."""
    from hookd.tool.check import names
    from hookd.tool.check.problem import Problem

    file, line = str(subject.file), subject.tree.lineno
    if "refused" in ran:
        return [Problem(ran.get("file") or file, ran.get("line") or line, "refused", ran["refused"], ran["hint"])]
    found = [
        Problem(one["file"] or file, one["line"] or line, "raised", f"{one['hook']} raised {one['error']}")
        for one in ran["raised"]
    ]
    if ran["errors"] and not found:
        found.append(Problem(file, line, "raised", ran["logs"][-1] if ran["logs"] else "a hook has failed"))
    fix = "an observer must change nothing: no operation in place, no random numbers; see docs/plugins.md"
    if ran["broken"]:
        found.append(Problem(file, line, "changed", f"the training fails with it: {ran['broken']}", fix))
    if ran["difference"]:
        found.append(Problem(file, line, "changed", f"the training goes another way with it: {ran['difference']}", fix))
    for one in ran["metrics"]:
        name = one["name"].removeprefix(f"hookd_{subject.name}_")
        found += names.lint(one["kind"], name, "told", one["labels"], file=one["file"], line=one["line"])
    return found


def _rehearse(subject: Subject, chosen: dict[str, str]) -> dict[str, Any]:
    """Host a daemon half once, in a process of the Python that runs hookd: that is where it will be.

    Raises:
        HookdError: the process ended without an answer.
    """
    _progress(f"a daemon hosts {subject.name}")
    with tempfile.TemporaryDirectory() as home:
        out = Path(home, "answer.json")
        request = {"name": subject.name, "files": [str(file) for file in subject.files], "options": chosen}
        request |= {"entry": subject.entry, "directory": str(subject.directory), "out": str(out)}
        status, told = _script(sys.executable, Path(home), _REHEARSAL, request, TIMEOUT_S)
        if not out.exists():
            raise _unanswered(status, told)
        return _answer(out)


def _run(subjects: list[Subject], what: str, python: str, chosen: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Train with each plugin in a process of another Python, which needs torch and nothing else; by `entry`.

    Raises:
        HookdError: reason "no-torch"; or the process ended without an answer.
    """
    from hookd.tool.attach import payload

    _progress(f"a small model is trained with {', '.join(one.name for one in subjects)}, and without")
    with tempfile.TemporaryDirectory() as home:
        payload.unpack_testing(Path(home))
        outs = {one.entry: Path(home, f"answer{at}.json") for at, one in enumerate(subjects)}
        plugins = [
            {"entry": one.entry, "directory": str(one.directory), "out": str(outs[one.entry])} for one in subjects
        ]
        request = {"what": what, "options": chosen, "plugins": plugins}
        status, told = _script(python, Path(home), _MAIN, request, TIMEOUT_S * len(subjects))
        if all(out.exists() for out in outs.values()):
            return {entry: _answer(out) for entry, out in outs.items()}
    if status == _NO_TORCH:
        hint = "Give one that has it (--python /path/to/python), or look at the source only (--static)."
        raise HookdError(f"{python} has no torch, so nothing can be trained with it", reason="no-torch", hint=hint)
    raise _unanswered(status, told)


def _answer(out: Path) -> dict[str, Any]:
    """Read what a trial has written: the plugin's code could as well have written it.

    Raises:
        HookdError: it is not an answer.
    """
    from hookd.tool.attach.trusted import ANYBODY

    try:
        return dict(json.loads(ANYBODY.read(out)))
    except (PluginError, ValueError, TypeError, RecursionError) as error:
        raise HookdError(
            "the trial has written something else than its answer", hint="Look at the plugin's code."
        ) from error


def _unanswered(status: int, told: str) -> HookdError:
    return HookdError(told.strip()[-2000:] or f"the trial ended with {status}")


def _script(python: str, home: Path, main: str, request: dict[str, Any], timeout_s: float) -> tuple[int, str]:
    """Run a text as a script: its folder comes first on the path, whatever lies in the current one."""
    script = home / "trial.py"
    script.write_text(main)
    return trial.finished([python, str(script), json.dumps(request)], timeout_s)


_NO_TORCH = 79
_MAIN = f"""
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


def _show(report: dict[str, Any]) -> None:
    """Print the findings, and what each hook costs."""
    _show_found(report)
    _show_run(report)


def _show_found(report: dict[str, Any]) -> None:
    """Print the findings as a compiler does."""
    here = Path.cwd()
    for one in report["problems"]:
        file = Path(one.file)
        short = file.relative_to(here) if file.is_relative_to(here) else file
        where = f"{short}:{one.line}" if one.line else str(short)
        kind = "warning" if one.is_warning else "error"
        click.echo(output.plain(f"{where}: {kind}: {one.message} [{one.rule}]", lines=True))
        if one.fix:
            click.echo(output.plain(f"    {one.fix}", lines=True))


def _show_run(report: dict[str, Any]) -> None:
    rows = [(hook, str(told["calls"]), _ns(told)) for hook, told in report["hooks"].items()]
    if rows:
        output.show(output.fill(output.table("HOOK", ">CALLS", ">PER CALL"), rows))
    if report["uncalled"]:
        named = ", ".join(report["uncalled"])
        output.say(
            f"{report['plugin']}: no module of the small models made a call of {named}: test it on a model of yours"
        )
    if all(one.is_warning for one in report["problems"]):
        ran = f", and {_hosted(report) if report['half'] == 'daemon' else _trained(report)}" if report["is_run"] else ""
        typed = "" if report["is_typed"] else "; types were not looked at (pip install mypy)"
        output.say(f"{_titled(report)}: nothing to mend{ran}{typed}")
    elif not report["is_run"]:
        done = "nothing was trained with it" if report["half"] == "target" else "it was not hosted"
        output.say(f"{_titled(report)}: {done} before this is mended")


def _titled(report: dict[str, Any]) -> str:
    name = report["plugin"] or Path(report["file"]).name
    return f"{name}, in the daemon" if report["half"] == "daemon" else str(name)


def _hosted(report: dict[str, Any]) -> str:
    return f"a daemon has hosted it with ranks that came and went ({', '.join(report['hosted']) or 'it has no hooks'})"


def _trained(report: dict[str, Any]) -> str:
    return (
        "it changes the training, as it says" if report["mutates"] else "the training is the same with it, bit for bit"
    )


def _ns(told: dict[str, float]) -> str:
    return f"{output.seconds(told['ns'] / 1e9)} ({output.seconds(told['low_ns'] / 1e9)} to {output.seconds(told['high_ns'] / 1e9)})"


def _show_bench(report: dict[str, Any]) -> None:
    for model, told in report["models"].items():
        table = output.table(
            "HOOK", ">CALLS", ">PER CALL", ">BYTES, AT MOST", ">BYTES, KEPT", title=f"{report['plugin']} on {model}"
        )
        rows = [
            (hook, str(one["calls"]), _ns(one), f"{one['peak_bytes']:.0f}", f"{one['kept_bytes']:.0f}")
            for hook, one in told["hooks"].items()
        ]
        ratio, control = (_bounds(told[key]) for key in ("ratio", "control"))
        output.show(output.fill(table, rows), f"a step takes {ratio} times as long with it; plain to plain {control}\n")


def _bounds(told: dict[str, float]) -> str:
    return f"{told['median']:.3f} ({told['low']:.3f} to {told['high']:.3f})"
