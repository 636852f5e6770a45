"""Replace the agent of an older hookd by ours: check whether this is allowed, and take over its plugins."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

import hookd
from hookd.errors import AttachError, ControlError
from hookd.tool.attach.control import Control, detach
from hookd.tool.config import PluginSpec
from hookd.wire import page

if TYPE_CHECKING:
    from hookd.tool.attach.request import AttachRequest
    from hookd.wire.agent import PluginStatus
    from hookd.wire.identity import Identity


def is_ours(there: Identity) -> bool:
    """Whether the agent with this identity has our version and speaks our protocol."""
    return (there.get("agent_version"), there.get("protocol", page.PROTOCOL)) == (hookd.__version__, page.PROTOCOL)


def plan(pid: int, request: AttachRequest, there: Identity) -> AttachRequest:
    """Return the request with the plugins of the older agent in process `pid` added.

    Only an agent that was attached, has no holder and does not change the training is replaced without asking. This function
    changes nothing.

    Raises:
        AttachError: reason "agent-version": the agent must not be replaced.
        ControlError: it does not answer.
    """
    version = str(there.get("agent_version"))
    if not _age(version, there.get("protocol")) < _age(hookd.__version__, page.PROTOCOL):
        raise _refusal(pid, version, "not older than this one", "Use that version, or end its agent")
    if there.get("method") != "attach":
        raise _refusal(pid, version, f"started by its own program ({there.get('method')})", "End that agent")
    with Control.connect(pid, request.timeout_s) as control:
        status = control.status()
    if status.get("leases"):
        holders = ", ".join(map(str, status.get("holders", ()))) or "another hookd"
        raise _refusal(pid, version, f"which is held by process {holders}", "End or upgrade that, or end the agent")
    plugins = [plugin for plugin in status.get("plugins", ()) if plugin.get("state") != "disabled"]
    if changing := [str(plugin["name"]) for plugin in plugins if plugin.get("mutates")]:
        raise _refusal(pid, version, f"whose {', '.join(changing)} changes the training", "End that agent")
    asked = {spec.name for spec in request.plugins}
    inherited = tuple(_spec(plugin) for plugin in plugins if plugin.get("name") not in asked)
    lease_s = None if there.get("keep") is True else request.lease_s
    return dataclasses.replace(request, plugins=(*request.plugins, *inherited), lease_s=lease_s)


def send_away(pid: int, timeout_s: float) -> None:
    """Detach the older agent.

    Raises:
        ControlError: it does not detach; reason "pending": it detaches only after a call that began under it.
    """
    if detach(pid, timeout_s).get("restored") == "pending":
        raise ControlError(
            f"the older agent leaves process {pid} when the current module call returns",
            reason="pending",
            hint="Try again.",
        )


def _refusal(pid: int, version: str, why: str, what: str) -> AttachError:
    return AttachError(
        f"process {pid} has an agent of hookd {version}, {why}; this is hookd {hookd.__version__}",
        reason="agent-version",
        hint=f"{what} with `hookd detach {pid}`, then attach again.",
    )


def _spec(plugin: PluginStatus) -> PluginSpec:
    options = {str(key): str(value) for key, value in dict(plugin.get("options") or {}).items()}
    return PluginSpec(str(plugin["name"]), options, by_name=plugin.get("by_name") is True)


def _age(version: str, protocol: object) -> tuple[object, ...]:
    """Return a sort key for versions: by number, then by stage (dev, rc, final), then by the page's protocol."""
    match = re.match(r"(\d+(?:\.\d+)*)(?:\.?(dev|rc)(\d+))?", version)
    release, stage, count = match.groups() if match else ("0", None, None)
    numbers = [int(number) for number in release.split(".")]
    order = {"dev": 0, "rc": 1, None: 2}[stage]
    return numbers, order, int(count or 0), protocol if isinstance(protocol, int) else 0
