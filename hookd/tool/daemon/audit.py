"""Audit log of attaches, detaches and plugin changes, and the check against `[plugins] allow`.

Each log line names who asked and what was carried into the target. The hash of a payload or plugin covers every byte
that was carried. It has a line of its own before the first attach that carries it, and whenever it changes. A plugin that the
target's own environment provides is not carried; its hash is the one that the agent read there.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from hookd.errors import PermissionDenied
from hookd.tool.linux.owner import user_name
from hookd.wire.text import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from hookd.tool.config import ServeConfig
    from hookd.wire.agent import Caller, Source
    from hookd.wire.answer import Attached, ChangedTarget
    from hookd.wire.labels import Claim

_log = logging.getLogger(__name__)
_HASHES: dict[str, str] = {}
"""The hash that was logged last, by what it is of."""
_MOST_HASHES = 1000
_DID = {"load": "loaded", "unload": "taken out", "reload": "reloaded", "configure": "configured"}


def require_allowed(
    config: ServeConfig, pid: int, names: Iterable[str], plugin_dirs: Sequence[Path], by: Caller | None
) -> None:
    """Refuse and log plugins that `[plugins] allow` does not name.

    With such a list, plugin sources are searched in the daemon's own environment and directories only. Otherwise a
    caller could pass a different plugin under an allowed name.

    Raises:
        PermissionDenied: reason "plugin-not-allowed".
    """
    if config.plugins_allow is None:
        return
    refused = [name for name in names if not config.allows(name)]
    if refused:
        what, hint = (
            f"plugin {', '.join(refused)} is not allowed",
            f"It allows {', '.join(config.plugins_allow) or 'none'}.",
        )
    elif plugin_dirs:
        what = "a plugin directory of a request is not allowed"
        hint = "With an allow-list the daemon looks in [attach] plugin_dirs alone."
    else:
        return
    _log.warning("process %d: %s by [plugins] allow, %s", pid, what, who(by))
    raise PermissionDenied(
        f"{what} by this daemon's configuration ([plugins] allow)", reason="plugin-not-allowed", hint=hint
    )


def attached(answer: Attached, why: str, by: Caller | None = None) -> None:
    """Log an attach: the owner of the process, the caller, and what was carried."""
    is_there = answer["method"] == "existing"
    whose = _process(answer["pid"], answer["user"])
    did = f"holds the agent that is in {whose} already," if is_there else f"attached to {whose}"
    plugins = answer.get("carried", {})
    _tell("payload", answer.get("payload"))
    for name, source in plugins.items():
        _tell(f"plugin {_named(name, source)}", source.get("sha256"))
    carried = ", ".join(_named(name, source) for name, source in plugins.items())
    asked = f", {who(by)}" if by else ""
    _log.info(
        "%s %s: run %s, rank %s%s%s", did, why, answer["run"], answer["rank"], asked,
        f"; plugins {carried}" if carried else "",
    )  # fmt: skip


def _tell(what: str, sha256: str | None) -> None:
    """Log the hash of what is carried, unless it is the one that was logged last."""
    if sha256 and _HASHES.get(what) != sha256:
        if len(_HASHES) >= _MOST_HASHES:
            _HASHES.clear()
        _HASHES[what] = sha256
        _log.info("%s has sha256 %s", what, sha256)


def detached(pid: int, user: str, claim: Claim | None, by: Caller) -> None:
    """Log a detach: the owner of the process, the labels that it was served under, and the caller."""
    served = f": run {claim.run}, rank {claim.rank}" if claim is not None else ""
    _log.info("detached from %s as asked%s, %s", _process(pid, user), served, who(by))


def _process(pid: int, user: str) -> str:
    return f"process {pid}" + (f" of user {one_line(user)}" if user else "")


def changed(answer: ChangedTarget, op: str, name: str, by: Caller | None) -> None:
    """Log a change of a target's plugins."""
    sha256 = answer.get("sha256")
    what = f"{_named(name, answer)} (sha256 {sha256})" if sha256 else _named(name, answer)
    _log.warning("plugin %s %s in process %d, %s", what, _DID.get(op, op), answer["pid"], who(by))


def _named(name: str, source: Source | ChangedTarget) -> str:
    return f"{one_line(name)} {one_line(source.get('version') or '')}".rstrip()


def who(by: Caller | None) -> str:
    """Describe the caller according to the kernel; None stands for a rule of the daemon."""
    return f"for user {one_line(user_name(by['uid']))} (process {by['pid']})" if by else "by its own rule"
