"""`hookd plugin list`: the daemon plugins, running or available."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookd.errors import HookdError
from hookd.tool.cli import output, targets
from hookd.tool.cli.loaded import error_lines

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hookd.tool.daemon.plugins.rows import DaemonPluginRow


def in_daemon(plugin_dirs: Sequence[Path], host: str | None) -> list[DaemonPluginRow]:
    """Return a row per plugin of the running daemon; without a daemon one per available plugin, state None."""
    from hookd.tool.daemon.plugins import discovery

    client = targets.daemon(host)
    if client is not None:
        try:
            return client.plugins()
        except HookdError:  # a daemon of an older version
            return []
    plugins, _ = discovery.find(plugin_dirs, lambda _: True)
    return [plugin.row() for plugin in plugins]


def show_in_daemon(rows: Sequence[DaemonPluginRow]) -> None:
    """Print a table of the daemon plugins, if there are any, and their errors."""
    if not rows:
        return
    cells = [
        (row["name"], row["version"] or "-", row["state"] or "not running", str(row.get("errors", 0)),
         output.seconds(row.get("seconds")), row["entry"])
        for row in rows
    ]  # fmt: skip
    output.show(output.fill(output.table("IN THE DAEMON", "VERSION", "STATE", "ERRORS", "TIME", "FROM"), cells))
    for row in rows:
        for text in error_lines(row["name"], row["error"]):
            output.say(text)
