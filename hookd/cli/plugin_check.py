"""`hookd plugin check` and `hookd plugin bench`: what an author should mend, and what the plugin costs.

The half for targets is run by a Python with torch, the half for the daemon by the one that runs hookd.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hookd.cli import options, output
from hookd.errors import HookdError, PluginError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hookd.check.problem import Problem
    from hookd.check.source import Subject

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
    ranks that come and go. Exit code 1: something is wrong.
    """
    from hookd.check import source

    chosen = {"target": _options(settings), "daemon": _options(daemon_settings)}
    subjects = source.subjects(path)
    reports = [_checked(one, subjects, python, chosen[one.half], static=static) for one in subjects]
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
    from hookd.check import source

    reports = []
    subjects = [one for one in source.subjects(path) if one.half == "target"]
    if not subjects:
        raise PluginError(
            f"there is no plugin for targets in {path}", hint="What runs in the daemon costs a training nothing."
        )
    for subject in subjects:
        found = _run(subject, "bench", python, _options(settings))
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


def _checked(
    subject: Subject, beside: Sequence[Subject], python: str, chosen: dict[str, str], *, static: bool
) -> dict[str, Any]:
    from hookd.check import blocking, names, packaging, signatures, types

    found = [*signatures.problems(subject), *packaging.problems(subject)]
    if subject.half == "target":
        found += blocking.problems(subject)
    else:
        others = (one for one in beside if one.half == "target" and one.name == subject.name)
        found += (problem for other in others for problem in names.twice(subject, other))
    found += [one for file in subject.files for one in names.declared(file, subject.half)]
    report: dict[str, Any] = {
        "plugin": subject.name, "half": subject.half, "file": str(subject.file), "hooks": {}, "is_run": False,
    }  # fmt: skip
    report["is_typed"] = types.is_possible()
    if report["is_typed"]:
        found += types.problems(subject)
    if static or not all(one.is_warning for one in found):
        pass
    elif subject.half == "daemon":
        ran = _rehearse(subject, chosen)
        found += _of_rehearsal(subject, ran, found)
        report |= {"is_run": True, "hosted": ran.get("hooks", [])}
    else:
        ran = _run(subject, "check", python, chosen)
        found += _of_run(subject, ran)
        report |= {"is_run": True, "hooks": ran.get("hooks", {}), "mutates": ran.get("mutates", False)}
    return {**report, "problems": sorted(set(found))}


def _of_rehearsal(subject: Subject, ran: dict[str, Any], found: list[Problem]) -> list[Problem]:
    """Say what came out of hosting it."""
    from hookd.check import names
    from hookd.check.problem import Problem

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


def _of_run(subject: Subject, ran: dict[str, Any]) -> list[Problem]:
    """Say what came out of training with it."""
    from hookd.check import names
    from hookd.check.problem import Problem

    file, line = str(subject.file), subject.tree.lineno
    if "refused" in ran:
        return [Problem(file, line, "refused", ran["refused"], ran["hint"])]
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
    """Host a daemon half once, in a process of the Python that runs hookd: that is where it will be."""
    request = {"name": subject.name, "files": [str(file) for file in subject.files]}
    with tempfile.TemporaryDirectory() as home:
        return _tried(subject, sys.executable, Path(home), _REHEARSAL, {**request, "options": chosen})


def _run(subject: Subject, what: str, python: str, chosen: dict[str, str]) -> dict[str, Any]:
    """Train with the plugin in a process of another Python, which needs torch and nothing else.

    Raises:
        HookdError: reason "no-torch"; or the process ended without an answer.
    """
    from hookd.attach import payload

    with tempfile.TemporaryDirectory() as home:
        payload.unpack_testing(Path(home))
        return _tried(subject, python, Path(home), _MAIN, {"what": what, "options": chosen})


def _tried(subject: Subject, python: str, home: Path, main: str, request: dict[str, Any]) -> dict[str, Any]:
    # As a script: its folder comes first on the path, whatever lies in the current one.
    script, out = home / "trial.py", home / "answer.json"
    script.write_text(main)
    request |= {"entry": subject.entry, "directory": str(subject.directory), "out": str(out)}
    words = [python, str(script), json.dumps(request)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HookdError(f"{subject.name}: {error}", hint="--python takes the path of a Python with torch.") from error
    if out.exists():
        answer: dict[str, Any] = json.loads(out.read_text())
        return answer
    if done.returncode == _NO_TORCH:
        hint = "Give one that has it (--python /path/to/python), or look at the source only (--static)."
        raise HookdError(f"{python} has no torch, so nothing can be trained with it", reason="no-torch", hint=hint)
    raise HookdError(f"{subject.name}: the trial ended with {done.returncode}: {done.stderr[-2000:]}")


_NO_TORCH = 79
_MAIN = f"""
import importlib.util, sys
if importlib.util.find_spec("torch") is None: sys.exit({_NO_TORCH})
from hookd.testing.measure import main
main()
"""
_REHEARSAL = f"""
import sys
sys.path.insert(1, {str(Path(__file__).parent.parent.parent)!r})
from hookd.testing.rehearsal import main
main()
"""


def _show(report: dict[str, Any]) -> None:
    """Print the findings as a compiler does, and what each hook costs."""
    here = Path.cwd()
    for one in report["problems"]:
        file = Path(one.file)
        short = file.relative_to(here) if file.is_relative_to(here) else file
        where = f"{short}:{one.line}" if one.line else str(short)
        kind = "warning" if one.is_warning else "error"
        click.echo(output.plain(f"{where}: {kind}: {one.message} [{one.rule}]", lines=True))
        if one.fix:
            click.echo(output.plain(f"    {one.fix}", lines=True))
    rows = [(hook, str(told["calls"]), _ns(told)) for hook, told in report["hooks"].items()]
    if rows:
        output.show(output.fill(output.table("HOOK", ">CALLS", ">PER CALL"), rows))
    if all(one.is_warning for one in report["problems"]):
        ran = f", and {_hosted(report) if report['half'] == 'daemon' else _trained(report)}" if report["is_run"] else ""
        typed = "" if report["is_typed"] else "; types were not looked at (pip install mypy)"
        output.say(f"{_titled(report)}: nothing to mend{ran}{typed}")
    elif not report["is_run"]:
        done = "nothing was trained with it" if report["half"] == "target" else "it was not hosted"
        output.say(f"{_titled(report)}: {done} before this is mended")


def _titled(report: dict[str, Any]) -> str:
    return f"{report['plugin']}, in the daemon" if report["half"] == "daemon" else str(report["plugin"])


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
