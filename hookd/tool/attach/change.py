"""Change the plugins of a running agent. Blocking.

A change that affects the training takes effect at one step: in a job of one rank at its next step, in a job of several ranks at a
boundary on which all of them agree, see `hookd.wire.agreement`. Either all ranks change, or none does.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, cast

from hookd.errors import ControlError, HookdError, PluginError, UsageError, several_ranks
from hookd.tool.attach import discover, payload, sources, trusted
from hookd.tool.attach.control import Control, reading
from hookd.tool.linux import proc
from hookd.wire.agreement import Agreement, boundary_ahead, disagreement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from hookd.errors import ErrorAnswer
    from hookd.tool.config import PluginSpec
    from hookd.wire.agent import Changed, ChangeStatus, PluginConfig, Request, Source
    from hookd.wire.answer import Attached, Change
    from hookd.wire.target import ErrorRow

MARGINS_S = (1.0, 4.0, 16.0)
"""How far ahead of all ranks the boundary is set, in seconds; each retry, after a rank was too quick, uses the next value."""
CARRIED = ("version", "sha256", "origin")
"""The keys that describe a plugin's source."""
_POLL_S = 0.02
Controls = dict[int, Control]
"""A connection to each rank's agent."""


def change(pid: int, op: str, spec: PluginSpec, plugin_dirs: Sequence[Path] = (), timeout_s: float = 10.0) -> Change:
    """Load, unload, reload or configure a plugin of the agent in process `pid`.

    A plugin that changes the training is changed in all ranks.

    Args:
        pid: the target, or any rank of its job.
        op: load, unload, reload (new source of the same name) or configure.
        spec: the plugin, and for load and configure its options.
        plugin_dirs: additional directories to search for it.
        timeout_s: how long to wait for the step at which the change takes effect.

    Returns:
        state: "done", or "pending" if the step was not reached in time; the change will then take effect there. ranks: the pid
        of each changed rank. step: the number of the step, as each rank counts. options: after a configure. version, sha256
        and origin (where it was found): of the plugin's source, if one was sent.

    Raises:
        HookdError: the agent refuses; reason "several-ranks": not all ranks are on this machine and attached;
            "cannot-agree": the ranks have no step in common. Nothing is changed then.
    """
    request: Request = {"op": op, **_arguments(pid, op, spec, plugin_dirs)}
    source = carried(request.get("plugin", {}))
    deadline = time.monotonic() + timeout_s
    for margin_s in MARGINS_S:
        with contextlib.suppress(_TooLateError), contextlib.ExitStack() as stack:
            stack.enter_context(_explaining(pid, op, spec.name, plugin_dirs))
            return {**source, **_attempt(stack, pid, request, margin_s, deadline, name=spec.name)}
    raise ControlError(
        "the ranks passed the chosen step before all of them had been told; nothing was changed", reason="cannot-agree",
        hint="The machine may be busy: try again.",
    )  # fmt: skip


def carried(plugin: Mapping[str, object]) -> Source:
    """Return the entries of a plugin's description that describe its source."""
    return cast("Source", {key: str(plugin[key]) for key in CARRIED if plugin.get(key)})


def enable_together(
    entries: Sequence[Attached | ErrorRow], name: str, enable: Callable[[str, int], Change | ErrorAnswer]
) -> None:
    """Enable a plugin in newly attached processes; once for all ranks that change together.

    Args:
        entries: for each process the result of the attach, an error or the plugins; if enabling fails, the error is added.
        name: of the plugin.
        enable: called with the operation and a pid; acts like `change`, but returns an error as an entry instead of raising.
    """
    changed: set[int] = set()
    for entry in entries:
        if "error" in entry or entry["pid"] in changed:
            continue
        answer = enable("configure" if name in entry["plugins"] else "load", entry["pid"])
        if "error" in answer:
            entry.update(answer)  # type: ignore[typeddict-item]  # an error
        else:
            changed.update(answer["ranks"].values())
    for entry in entries:
        if "error" not in entry and name not in entry["plugins"]:
            entry["plugins"].append(name)


def _arguments(pid: int, op: str, spec: PluginSpec, plugin_dirs: Sequence[Path]) -> Request:
    if op in ("load", "reload"):
        try:
            source = sources.find(spec.name, plugin_dirs, trusted.of_target(proc.status(pid).uid))
        except PluginError as error:
            if error.reason != "unknown-plugin":
                raise
            return {"plugin": spec.as_json()}  # it may be installed in the target's environment
        texts = {path: text.decode() for path, text in source.carried.items()}
        return {"plugin": payload.describe(spec, source), "sources": texts}
    if op == "unload":
        return {"name": spec.name}
    if op == "configure":
        return {"name": spec.name, "options": dict(spec.options)}
    raise UsageError("the request's 'op' is none of load, unload, reload, configure", reason="bad-request")


class _TooLateError(ControlError):
    """A rank had passed the boundary; nothing is changed, and another boundary can be tried."""


def _attempt(
    stack: contextlib.ExitStack, pid: int, request: Request, margin_s: float, deadline: float, *, name: str
) -> Change:
    """Prepare all ranks, choose the step, arm all, commit, and wait for it.

    Closing a connection undoes everything.
    """
    first = stack.enter_context(Control.connect(pid))
    answer = cast("Changed", first.request(**request))
    description = cast("Change", carried(answer))
    if "options" in answer:
        description["options"] = answer["options"]
    if answer.get("state") != "prepared":
        return {"state": "done", "ranks": {str(answer.get("rank", 0)): pid}, **description}
    with reading(pid):
        own_rank, world_size = int(answer["rank"]), int(answer["ranks"])
    controls = {own_rank: first}
    with _abandoning_on_error(controls):
        if world_size == 1:
            first.request("arm")
            return {**_await_done(controls, deadline), **description}
        for rank, other in _others(pid, world_size, name).items():
            with _naming(rank, other):
                controls[rank] = stack.enter_context(Control.connect(other))
                if controls[rank].request(**request).get("state") != "prepared":
                    raise PluginError("its options differ from those of the other ranks", reason="ranks-differ")
        _commit(controls, margin_s, deadline)
    return {**_await_done(controls, deadline), **description}


@contextlib.contextmanager
def _explaining(pid: int, op: str, name: str, plugin_dirs: Sequence[Path]) -> Iterator[None]:
    """Replace the agent's "no-such-plugin" by our own error, which may name a file that is not valid Python."""
    try:
        yield
    except PluginError as error:
        if error.reason != "no-such-plugin" or op not in ("load", "reload"):
            raise
        try:
            sources.find(name, plugin_dirs)
        except PluginError as ours:
            ours.message += f", nor in the environment of process {pid}"
            ours.hint = f"--plugin-dir says where else to look. {ours.hint}"
            raise PluginError(ours.message, reason="unknown-plugin", hint=ours.hint) from error
        raise


def environment(pid: int) -> list[PluginConfig]:
    """Return the plugins that are installed in the environment of a target: name, entry, version, origin.

    Raises:
        HookdError: the agent does not answer.
    """
    with Control.connect(pid) as control:
        plugins = control.request("environment").get("plugins")
    plugins = [plugin for plugin in plugins if isinstance(plugin, dict)] if isinstance(plugins, list) else []
    return cast("list[PluginConfig]", plugins)


@contextlib.contextmanager
def _abandoning_on_error(controls: Controls) -> Iterator[None]:
    """Abandon the change in all ranks if one of them fails."""
    try:
        yield
    except BaseException:
        for control in controls.values():
            with contextlib.suppress(HookdError):
                control.request("abandon")
        raise


@contextlib.contextmanager
def _naming(rank: int, pid: int) -> Iterator[None]:
    try:
        yield
    except HookdError as exc:
        exc.message = f"rank {rank} (process {pid}): {exc.message}; no rank is changed"
        exc.args = (exc.message,)
        raise


def _others(pid: int, world_size: int, name: str) -> dict[int, int]:
    """Return the pids of the other ranks of a target's job, by rank.

    They have the same user, run, number of ranks and parent.

    Raises:
        PluginError: reason "several-ranks": not all are on this machine and attached, or two processes report the same rank.
    """
    here = discover.identity(pid) or {}
    own = proc.status(pid)
    parent, twice = own.ppid, ""
    pids: dict[int, int] = {}
    for candidate in discover.candidates():
        with contextlib.suppress(HookdError, OSError):  # it may end during the inspection
            status = proc.status(candidate.pid)
            if candidate.state != "attached" or (status.uid, status.ppid) != (own.uid, parent):
                continue
            there = discover.identity(candidate.pid) or {}
            if (there.get("run"), there.get("world_size")) == (here.get("run"), world_size):
                rank = int(there.get("rank", 0))
                if rank in pids:  # only one of the two would be changed
                    twice = f"processes {pids[rank]} and {candidate.pid} both say that they are rank {rank} of it"
                pids[rank] = candidate.pid
    if twice:
        raise several_ranks(name, world_size, twice)
    if sorted(pids) != list(range(world_size)):
        ranks = ", ".join(map(str, sorted(pids)))
        raise several_ranks(
            name,
            world_size,
            f"hookd is attached to {len(pids)} of them on this machine (rank {ranks}); `hookd attach --tree {parent}` "
            f"attaches to all that process {parent} has started. A job that spans machines cannot be changed: its ranks "
            "could not agree on the step.",
        )
    return {rank: other for rank, other in pids.items() if other != pid}


def _commit(controls: Controls, margin_s: float, deadline: float) -> None:
    """Make all ranks agree on a boundary ahead, or none.

    Raises:
        _TooLateError: a rank reached it before all knew of it.
        ControlError: reason "cannot-agree", or a rank is gone.
    """
    mark = _boundary(controls, margin_s, deadline)
    agreement = Agreement.create(len(controls))
    try:
        for control in controls.values():
            control.request("arm", mark=mark, fds=[agreement.fd])
        if not agreement.decide(commit=True):
            raise _TooLateError(f"a rank was at boundary {mark} first", reason="passed")
    except HookdError as exc:
        agreement.decide(commit=False)
        if exc.reason == "passed":
            raise _TooLateError(exc.message, reason="passed") from exc
        raise
    finally:
        agreement.close()


def _boundary(controls: Controls, margin_s: float, deadline: float) -> int:
    """Return a boundary ahead of all ranks, once they have taken comparable steps."""
    while True:
        marks, spans_s = zip(*map(_progress, controls.values()), strict=True)
        why = disagreement(marks)
        if not why:
            return boundary_ahead(zip(marks, spans_s, strict=True), margin_s)
        if time.monotonic() > deadline:
            raise ControlError(
                f"the ranks have no step in common: {why}; nothing is changed", reason="cannot-agree",
                hint="hookd recognizes steps by the collectives of the default process group. A long step needs a larger --timeout.",
            )  # fmt: skip
        time.sleep(_POLL_S)


def _progress(control: Control) -> tuple[list[int], float]:
    """Return the marks of a rank's last boundaries, and the time between the first and the last of them in seconds."""
    status = control.status()
    with reading(control.pid):
        return [int(mark) for mark in status.get("marks", ())], float(status.get("span_s", 0.0))


def _last_change(control: Control) -> ChangeStatus:
    change = control.status().get("change")
    return change if isinstance(change, dict) else cast("ChangeStatus", {})


def _await_done(controls: Controls, deadline: float) -> Change:
    """Wait until every rank has reached the step.

    Raises:
        ControlError: reason "ranks-differ": the ranks report different steps.
    """
    ranks = {str(rank): control.pid for rank, control in sorted(controls.items())}
    while True:
        reports = {rank: _last_change(control) for rank, control in sorted(controls.items())}
        if all(report.get("state") == "done" for report in reports.values()):
            break
        if time.monotonic() > deadline:
            return {"state": "pending", "ranks": ranks}
        time.sleep(_POLL_S)
    marks = {rank: report.get("at") for rank, report in reports.items()}
    if any(mark != next(iter(marks.values())) for mark in marks.values()):
        raise ControlError(f"the ranks changed at different steps: boundaries {marks}", reason="ranks-differ",
                           hint="Their weights differ from here on. Go back to a checkpoint.")  # fmt: skip
    steps = {str(rank): str(report.get("step") or "") for rank, report in reports.items()}
    return {"state": "done", "ranks": ranks, "step": steps}
