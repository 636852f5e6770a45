"""Host a daemon plugin with simulated ranks that join, step, record incidents and end, for `hookd plugin check`.

    python -m hookd.testing.rehearsal '{"name": "spread", "entry": "hookd_spread.daemon:Spread", "directory": "/src", …}'

Runs in its own process, in the daemon's environment, without torch. It writes a JSON object to `out`.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hookd.errors import HookdError
from hookd.testing.daemon import FakeDaemon

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hookd.serving import ReportedFamily
    from hookd.testing.trials import Refusal, RehearsalAnswer, RehearsalError, RehearsalRequest, RehearsedMetric
    from hookd.tool.daemon.plugins.discovery import AvailablePlugin
    from hookd.wire.hook_error import HookError

_FRAME = re.compile(r'File "(.+?)", line (\d+)')
_WHERE = re.compile(r"(.+?):(\d+), in ")
"""For a hook that takes too long there is no traceback, only the line that it is at."""


def rehearse(plugin: AvailablePlugin, options: Mapping[str, object], directory: str) -> RehearsalAnswer:
    """Host a daemon plugin and make all requests that a daemon makes, the periodic ones at least twice.

    Args:
        plugin: the daemon plugin, not imported yet.
        options: for its `configure`.
        directory: of the plugin's sources.

    Returns:
        Its `hooks`, the errors `raised` with the plugin's lines, and the `metrics` that it returned.

    Raises:
        PluginError: the plugin is refused.
    """
    with FakeDaemon() as daemon:
        daemon.begin([plugin], options)
        first, second, third = daemon.ranks(3)
        for rank in (first, second, third):
            rank.run_steps()
        daemon.look(2)
        second.incident("rehearsal", "an incident of no consequence")
        third.kill()
        daemon.look()
        first.run_steps()
        second.detach()
        daemon.look()
        hooks = sorted(daemon.hooks(plugin.name))
        metrics = [_declared(plugin.name, family) for family in daemon.families(plugin.name)]
        raised = list(_commands(daemon))
        daemon.close()
        raised += [_placed(error, directory) for error in daemon.last_errors]
    return {
        "hooks": hooks,
        "metrics": metrics,
        "raised": list({tuple(error.items()): error for error in raised}.values()),
    }


def _commands(daemon: FakeDaemon) -> Iterator[RehearsalError]:
    """Register the plugin's commands and print the help of each, without running any; yield an error if that fails."""
    try:
        for name in daemon.commands():
            daemon.invoke(name, "--help")
    except Exception as error:  # noqa: BLE001  (of the plugin)
        text = error.message if isinstance(error, HookdError) else f"{type(error).__name__}: {error}"
        yield {"hook": "register_commands", "text": text, "file": "", "line": 0}


def _declared(plugin: str, family: ReportedFamily) -> RehearsedMetric:
    name = family.name.removeprefix(f"hookd_{plugin}_")
    return {"kind": family.kind, "name": name, "help": family.help, "labels": list(family.labels)}


def _placed(error: HookError, directory: str) -> RehearsalError:
    places = _FRAME.findall(error["traceback"]) or _WHERE.findall(error["where"])
    frames = [place for place in places if place[0].startswith(directory)]
    file, line = (frames[-1][0], int(frames[-1][1])) if frames else ("", 0)
    return {"hook": error["hook"], "text": error["text"], "file": file, "line": line}


def main() -> None:
    """Run the request in the only argument."""
    from hookd.tool.attach.sources import Source
    from hookd.tool.daemon.plugins.discovery import AvailablePlugin, without_torch

    request: RehearsalRequest = json.loads(sys.argv[1])
    sys.path.insert(0, request["directory"])
    files = {path: Path(path).read_bytes() for path in request["files"]}
    plugin = AvailablePlugin(request["name"], Source(request["name"], request["entry"], files))
    try:
        with without_torch():
            report: RehearsalAnswer | Refusal = rehearse(plugin, request["options"], request["directory"])
    except HookdError as error:
        report = {"refused": error.message, "hint": error.hint}
    Path(request["out"]).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
