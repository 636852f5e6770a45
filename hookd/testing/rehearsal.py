"""Host one daemon half once, with ranks that come, step, tell and end: what `hookd plugin check` runs.

    python -m hookd.testing.rehearsal '{"name": "spread", "entry": "hookd_spread.daemon:Spread", "directory": "/src", …}'

Runs in a process of its own, in the daemon's environment: with no torch. It writes one JSON object into `out`.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookd.errors import HookdError
from hookd.testing.daemon import FakeDaemon

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hookd.serving import Told
    from hookd.tool.daemon.plugins.discovery import Half

_FRAME = re.compile(r'File "(.+?)", line (\d+)')
_WHERE = re.compile(r"(.+?):(\d+), in ")
"""Of what takes too long there is no traceback, but where it stands."""


def rehearse(half: Half, options: Mapping[str, object], directory: str) -> dict[str, Any]:
    """Host a daemon half; everything that a daemon asks for is asked for, twice at least.

    Args:
        half: to be imported.
        options: for its `configure`.
        directory: of the plugin's sources: lines in it are the author's.

    Returns:
        `hooks` that it has, `raised` with the author's lines, `metrics` that it told, `commands` that it adds.

    Raises:
        PluginError: it is refused.
    """
    with FakeDaemon() as daemon:
        daemon.begin([half], options)
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
        hooks = sorted(daemon.hooks(half.name))
        metrics = [_declared(half.name, told) for told in daemon.told(half.name)]
        raised = list(_commands(daemon))
        daemon.close()
        raised += [_placed(one, directory) for one in daemon.troubles]
    return {"hooks": hooks, "metrics": metrics, "raised": [dict(one) for one in dict.fromkeys(map(_frozen, raised))]}


def _commands(daemon: FakeDaemon) -> Iterator[dict[str, Any]]:
    """Ask for the commands, and for the help page of each: none of them is run."""
    try:
        for name in daemon.commands():
            daemon.invoke(name, "--help")
    except Exception as error:  # noqa: BLE001  (the author's)
        text = error.message if isinstance(error, HookdError) else f"{type(error).__name__}: {error}"
        yield {"hook": "register_commands", "text": text, "file": "", "line": 0}


def _declared(plugin: str, told: Told) -> dict[str, Any]:
    name = told.name.removeprefix(f"hookd_{plugin}_")
    return {"kind": told.kind, "name": name, "help": told.help, "labels": list(told.labels)}


def _placed(trouble: Mapping[str, str], directory: str) -> dict[str, Any]:
    found = _FRAME.findall(trouble["traceback"]) or _WHERE.findall(trouble["where"])
    frames = [one for one in found if one[0].startswith(directory)]
    file, line = (frames[-1][0], int(frames[-1][1])) if frames else ("", 0)
    return {"hook": trouble["hook"], "text": trouble["text"], "file": file, "line": line}


def _frozen(one: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(one.items())


def main() -> None:
    """Do what the only argument says."""
    from hookd.tool.attach.sources import Source
    from hookd.tool.daemon.plugins.discovery import Half, without_torch

    request = json.loads(sys.argv[1])
    sys.path.insert(0, request["directory"])
    files = {path: Path(path).read_bytes() for path in request["files"]}
    half = Half(request["name"], Source(request["name"], request["entry"], files))
    try:
        with without_torch():
            told = rehearse(half, request["options"], request["directory"])
    except HookdError as error:
        told = {"refused": error.message, "hint": error.hint}
    Path(request["out"]).write_text(json.dumps(told))


if __name__ == "__main__":
    main()
