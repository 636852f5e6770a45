"""Read incidents from the daemon if one runs, else from its database file."""

from __future__ import annotations

import os
from contextlib import closing
from typing import TYPE_CHECKING

from hookd.errors import HookdError

if TYPE_CHECKING:
    from pathlib import Path

    from typing_extensions import Unpack

    from hookd.tool.daemon.client import DaemonClient
    from hookd.tool.daemon.incidents.rows import Query
    from hookd.wire.incident import IncidentRow


def rows(client: DaemonClient | None, state_dir: Path | None = None, **conditions: Unpack[Query]) -> list[IncidentRow]:
    """Return the incidents that match a query.

    Args:
        client: the daemon, if there is one; not used with `state_dir`.
        state_dir: the directory of the file; None for that of this user's daemon.
        conditions: the arguments of `hookd.tool.daemon.incidents.rows.query`.

    Raises:
        HookdError: the file cannot be read.
    """
    if client is not None and state_dir is None:
        return client.incidents(**conditions)
    import sqlite3

    from hookd.tool.daemon.incidents import store

    folder = place(state_dir)
    try:
        reader = store.read_only(folder)
        if reader is None:
            return []
        with closing(reader):
            return store.query(reader, **conditions)
    except (OSError, sqlite3.Error) as exc:
        raise HookdError(
            f"the incidents in {folder / store.NAME} cannot be read: {exc}",
            reason="store",
            hint="`hookd serve` renames a damaged file; use --state-dir for another directory.",
        ) from exc


def place(state_dir: Path | None = None) -> Path:
    """Return the directory of the file: `state_dir`, else that of the configuration."""
    from hookd.tool.config import default_state_dir, load

    return state_dir or load({}, os.environ).state_dir or default_state_dir(os.environ, os.geteuid())
