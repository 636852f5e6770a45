"""Define the request and the result of an attach."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from hookd.tool.config import PluginSpec
    from hookd.wire.agent import Source
    from hookd.wire.identity import Identity


@dataclass(frozen=True)
class AttachRequest:
    """The request of an attach.

    Attributes:
        plugins: to enable.
        timeout_s: of the whole attach.
        lease_s: how long the agent stays after its last holder is gone; None: until it is detached.
        run: the label `run`; derived from the target's environment if None.
        force: run the code directly if the main thread hangs, and ignore that CPython's remote debugging is disabled and that
            the process has few resources left for an agent (see `headroom`).
        only_trainers: refuse a data loader's worker (reason "data-worker"), because the user did not name this process.
        plugin_dirs: directories to search in addition to the installed plugins.
        budget: the share of a step's time that observers may take.
        detail: "auto" or "all", which modules are exported.
    """

    plugins: tuple[PluginSpec, ...]
    timeout_s: float = 10.0
    lease_s: float | None = 60.0
    run: str | None = None
    force: bool = False
    only_trainers: bool = False
    plugin_dirs: tuple[Path, ...] = ()
    budget: float = 0.01
    detail: str = "auto"


@dataclass(frozen=True)
class AttachResult:
    """The result of an attach.

    Attributes:
        method: "ptrace" (a stop of about 0.4 ms), "remote-debug" (no stop), "existing" (there was an agent already).
        pause_s: how long the main thread was stopped.
        wall_s: total duration.
        control: the agent's control socket, as a path for this process.
        identity: of the agent, from its page.
        loaded: the plugins that are loaded now.
        added: the plugins that were added to an existing agent.
        replaced: the version of the older agent that was replaced, else "".
        payload: the sha256 of the payload, "" if there was an agent already.
        untested: a message if Python or torch is newer than any version that hookd was tested with, else "".
        holders: pids of the processes that held the agent before; 0 for one in another pid namespace.
        carried: for each plugin that was sent, the `version`, `sha256` and `origin` of its source.
    """

    pid: int
    method: Literal["ptrace", "remote-debug", "existing"]
    pause_s: float
    wall_s: float
    control: Path
    identity: Identity
    loaded: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    holders: tuple[int, ...] = ()
    replaced: str = ""
    payload: str = ""
    untested: str = ""
    carried: Mapping[str, Source] = field(default_factory=dict)
