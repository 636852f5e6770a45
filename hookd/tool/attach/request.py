"""What is asked of an attach and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from hookd.tool.config import PluginSpec


@dataclass(frozen=True)
class AttachRequest:
    """What to bring into a target.

    Attributes:
        plugins: what to enable.
        timeout_s: how long the whole attach may take.
        lease_s: how long the agent stays when nobody holds it any more; None: until it is told to go.
        run: the label `run`; found from the target's environment if None.
        force: take the gated direct call on a main thread that hangs, and ignore that CPython's own remote debugging
            has been switched off, and that the process has little room for an agent (see `headroom`).
        only_trainers: refuse a data loader's worker (reason "data-worker"): nobody named the process itself.
        plugin_dirs: where plugins are sought beside those installed.
        budget: the share of a step's time that observers may take.
        detail: "auto" or "all", which modules are served.
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
    """What an attach has brought about.

    Attributes:
        method: "ptrace" (a stop of about 0.2 ms), "remote-debug" (none), "existing" (an agent was there).
        pause_s: for how long the main thread stood still.
        wall_s: how long it took in all.
        control: the agent's control socket, as a path for this process.
        identity: the agent's, from its page.
        loaded: the plugins that are there now.
        added: those that an agent had not that was there.
        replaced: the version of the older agent that had to go, else "".
        payload: the sha256 of what was brought in, "" where an agent was there.
        unproven: a line where Python or torch is newer than any that hookd was tried on, else "".
        carried: by plugin that was brought in, the `version`, `sha256` and `origin` of its source.
    """

    pid: int
    method: Literal["ptrace", "remote-debug", "existing"]
    pause_s: float
    wall_s: float
    control: Path
    identity: dict[str, Any]
    loaded: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    replaced: str = ""
    payload: str = ""
    unproven: str = ""
    carried: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
