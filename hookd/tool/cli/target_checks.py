"""The checks of `hookd doctor PID`, made from outside without stopping or changing the process."""

from __future__ import annotations

import contextlib
import os
import re
import time
from typing import TYPE_CHECKING

from hookd.errors import HookdError
from hookd.tool.cli import output, targets, untested
from hookd.tool.cli.checks import Check
from hookd.wire import tested_versions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hookd.tool.inject.interpreter import Interpreter
    from hookd.tool.linux.memory import Opened
    from hookd.tool.linux.proc import Status
    from hookd.wire.agent import AgentStatus
    from hookd.wire.identity import Identity

NAMESPACES = {"mnt": "mount", "pid": "pid", "user": "user", "net": "network"}
WATCH_S = 0.5
"""How long the main thread is watched."""


def of_target(pid: int, host: str | None = None) -> Iterator[Check]:
    """Yield a check for every reason that prevents an attach, and notes on the state of the process.

    Args:
        pid: of the process.
        host: the value of `--host`, the daemon that may hold the agent.
    """
    from hookd.tool.linux import proc

    try:
        status = proc.status(pid)
    except HookdError as error:
        cure = error.hint
        if hidden := _hides_processes():
            cure = f"/proc is mounted with {hidden}, which hides processes of other users: sudo hookd doctor {pid}"
        yield Check(f"process {pid}", "bad", error.message, cure)
        return
    yield _owner(status)
    states = list(_state(status))
    yield from states
    if status.state in "ZX":
        return
    yield from _disabled(pid)
    inside = list(_inside(status))
    yield from inside
    yield from _surroundings(status)
    if any(check.name == "Python" and check.state == "ok" for check in inside):
        yield from _agent(pid, host)
        # The position of the main thread says nothing about a process that is stopped, or that an attach refuses anyway.
        if all(check.state != "bad" for check in (*states, *inside)):
            yield from _main_thread(pid)


def _hides_processes() -> str:
    with contextlib.suppress(OSError), open("/proc/self/mounts") as mounts:  # noqa: PTH123
        match = re.search(r" /proc proc \S*?(hidepid=(?:[124]|invisible|noaccess|ptraceable))", mounts.read())
        return match[1] if match else ""
    return ""


def _owner(status: Status) -> Check:
    from hookd.tool.linux import permission
    from hookd.tool.linux.owner import user_name

    name, who = f"process {status.pid}", f"{status.name}, of user {user_name(status.uid)}, threads: {status.threads}"
    try:
        permission.require_owner(status)
    except HookdError as error:
        return Check(name, "bad", f"{who}; {error.message}", f"sudo hookd attach {status.pid}")
    return Check(name, "ok", who)


def _state(status: Status) -> Iterator[Check]:
    from hookd.tool.attach import target
    from hookd.tool.linux import proc

    try:
        target.require_awake(status.pid)
    except HookdError as error:
        tracer = ""
        if status.tracer:
            with contextlib.suppress(HookdError):
                tracer = f" ({proc.status(status.tracer).name})"
        yield Check("state", "bad", error.message + tracer, error.hint)
        return
    if frozen := _frozen(status.pid):
        yield Check("state", "bad", f"its cgroup is frozen ({frozen})", "Thaw the cgroup; an attach waits for that.")
    elif status.state == "D":
        cure = "An attach waits until it returns; check the disk or network file system that it waits for."
        yield Check("state", "note", "in an uninterruptible wait in the kernel (D)", cure)


def _frozen(pid: int) -> str:
    """Return the cgroup that freezes a process, "" if it is not frozen."""
    from hookd.tool.linux import cgroups

    for group in cgroups.folders(pid, "freezer"):
        for name, thawed in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
            with contextlib.suppress(OSError):
                if (group / name).read_text().strip() != thawed:  # FREEZING counts as frozen
                    return str(group)
    return ""


def _disabled(pid: int) -> Iterator[Check]:
    from hookd.tool.attach import discover

    with contextlib.suppress(OSError, HookdError):
        if discover.is_disabled(pid):
            cure = "This forbids an attach: start the process without HOOKD_DISABLE."
            yield Check("HOOKD_DISABLE", "bad", "is set in its environment", cure)


def _inside(status: Status) -> Iterator[Check]:
    """Check the memory of a process: its interpreter, its libraries, and how an attach enters it."""
    from hookd.tool.linux import permission, proc
    from hookd.tool.linux.memory import Opened

    pid = status.pid
    try:
        memory = Opened(pid, proc.program(pid))
    except OSError as exc:
        denied = permission.explain(pid, exc)
        yield Check("access", "bad", f"{denied.message} ({denied.reason})", denied.hint)
        return
    except HookdError as error:
        yield Check("Python", "bad", error.message, error.hint)
        return
    with memory:
        yield from _python(status, memory)


def _python(status: Status, memory: Opened) -> Iterator[Check]:
    from hookd.tool.attach import discover
    from hookd.tool.inject import interpreter
    from hookd.tool.linux import headroom, permission

    try:
        maps = memory.mappings()
        python = interpreter.find(memory, maps)
    except OSError as exc:
        denied = permission.explain(status.pid, exc)
        yield Check("access", "bad", f"{denied.message} ({denied.reason})", denied.hint)
        return
    except HookdError as error:
        yield Check("Python", "bad", error.message, error.hint)
        return
    yield Check("Python", "ok", f"CPython {python.version[0]}.{python.version[1]} in {python.image}")
    yield from _foundation(status.pid, memory, python)
    if not discover.has_torch(maps):
        yield Check(
            "torch",
            "bad",
            "no torch is loaded",
            "Attach after it has imported torch; hookd ps lists processes that have.",
        )
    yield from untested.of_build({mapping.path for mapping in maps})
    for shortage in headroom.shortages(status.pid, maps):
        yield Check("room", "bad", f"{shortage.message} ({shortage.reason})", shortage.hint)
    yield from _way_in(status, memory, python)


def _foundation(pid: int, memory: Opened, python: Interpreter) -> Iterator[Check]:
    """Yield the results of the checks of the interpreter on which an attach relies.

    A failed check prevents an attach on versions that are not tested; on others it is a note.
    """
    from hookd.tool.inject import foundation

    try:
        results = list(foundation.checks(memory, python))
    except OSError as exc:
        yield Check("foundation", "bad", f"its memory cannot be read: {exc}", f"sudo hookd attach {pid}")
        return
    failed = "note" if python.is_tested else "bad"
    cure = f"ptrace is used instead{'' if python.is_tested else f' with: hookd attach --force {pid}'}."
    yield from (Check(result.name, failed, result.found, cure) for result in results if not result.holds)
    if passed := ", ".join(f"{result.name} ({result.found})" for result in results if result.holds):
        newer = "" if python.is_tested else ", but this version is not yet tested"
        yield Check(
            "foundation",
            "note" if newer else "ok",
            f"the parts of Python that an attach relies on are as expected{newer}: {passed}",
        )


def _torch(status: AgentStatus, version: object) -> Iterator[Check]:
    """Yield the results of the checks of torch on which the agent relies, as it reports them."""
    rows: object = status.get("torch")  # the agent's answer: anything may be in it
    rows = [row for row in rows if isinstance(row, list) and len(row) == 3] if isinstance(rows, list) else []
    results = [(str(name), bool(holds), str(observed)) for name, holds, observed in rows]
    yield from (Check(name, "note", observed) for name, holds, observed in results if not holds)
    if results and all(holds for _, holds, _ in results):
        newer = (
            ", but this version is not yet tested"
            if tested_versions.minor(str(version)) > tested_versions.NEWEST_TORCH
            else ""
        )
        yield Check("torch", "note" if newer else "ok", f"{version}: all {len(results)} checks hold{newer}")


def _way_in(status: Status, memory: Opened, python: Interpreter) -> Iterator[Check]:
    from hookd.tool.inject import remote_debug

    pid = status.pid
    try:
        remote = remote_debug.find(memory, python)
    except OSError as exc:
        yield Check("way in", "bad", f"its memory cannot be read: {exc}", f"sudo hookd attach {pid}")
        return
    if remote is None:
        yield Check("way in", "ok", "ptrace: the main thread is stopped for a fraction of a millisecond")
        return
    if not remote.is_enabled:
        cure = f"hookd attach --force {pid} uses ptrace; or start it without PYTHON_DISABLE_REMOTE_DEBUG."
        yield Check("way in", "bad", "remote debugging was disabled when it was started", cure)
        return
    if removed := remote_debug.remove_stale(status):
        yield Check("files", "note", f"removed files that a killed hookd had left: {', '.join(removed)}")
    try:
        folder = remote_debug.ScriptFolder(status)
    except OSError:
        yield Check("way in", "note", "no writable directory for a script: ptrace is used, with a short stop")
        return
    folder.remove()
    yield Check("way in", "ok", "CPython's own remote debugging: nothing is stopped")


def _surroundings(status: Status) -> Iterator[Check]:
    from hookd.tool.linux import proc

    other = [
        name
        for kind, name in NAMESPACES.items()
        if (theirs := proc.link(status.pid, f"ns/{kind}")) and theirs != proc.link(os.getpid(), f"ns/{kind}")
    ]
    if other:
        cure = "hookd reaches it through /proc; for another user namespace run it as root." if "user" in other else ""
        yield Check("container", "note", f"in another {', '.join(other)} namespace", cure)
    if status.seccomp == 2:  # noqa: PLR2004  proc(5): a filter
        yield Check("seccomp", "note", "has a filter, which must allow mmap, munmap, memfd_create and Unix sockets")


def _agent(pid: int, host: str | None) -> Iterator[Check]:
    from hookd.tool.attach import discover, upgrade
    from hookd.tool.attach.request import AttachRequest

    try:
        there = discover.identity(pid)
    except (HookdError, OSError):  # not readable for us; another check reports that
        return
    if there is None:
        return
    status = _status(pid)
    agent = f"hookd {there.get('agent_version')}, by {there.get('method')}{_holders(status, there, host)}"
    if upgrade.is_ours(there):
        yield Check("agent", "ok", f"already attached: {agent}; attach joins it")
        if not isinstance(status, HookdError):
            yield from _torch(status, there.get("torch"))
            if (why := status.get("why_patched")) is not None:
                yield _calls(str(why))
        return
    try:
        upgrade.plan(pid, AttachRequest(()), there)
    except HookdError as error:
        yield Check("agent", "bad", error.message, error.hint)
        return
    yield Check("agent", "note", f"already attached: {agent}; attach replaces it")


def _calls(why_patched: str) -> Check:
    """Return the check of how calls of modules are observed."""
    if why_patched:
        return Check("calls", "note", f"nn.Module.__call__ is replaced in Python: {why_patched}")
    return Check("calls", "ok", "module calls are handled in C")


def _status(pid: int) -> AgentStatus | HookdError:
    """Return the agent's status, or the reason why it does not answer."""
    from hookd.tool.attach import Control

    try:
        with Control.connect(pid, WATCH_S * 4) as control:
            return control.status()
    except HookdError as error:
        return error


def _holders(status: AgentStatus | HookdError, there: Identity, host: str | None) -> str:
    """Return the part of the message that says what keeps the agent in the process."""
    if isinstance(status, HookdError):
        return f", which does not answer ({status.reason})"
    if holders := status.get("holders", ()):
        return f", held by {', '.join(targets.names(holders, host))}"
    if there.get("method") != "attach":
        return ", stays until the process ends"
    return ", kept until detached" if there.get("keep") else ", held by no process: it leaves when its lease expires"


def _main_thread(pid: int) -> Iterator[Check]:
    """Watch the main thread briefly.

    If it does not return to the interpreter, it cannot run the call that an attach queues.
    """
    from hookd.tool.linux import proc

    def switches() -> bytes:
        lines = proc.read(pid, "status").split(b"\n")
        return b"".join(line for line in lines if line.startswith(b"voluntary")) + proc.read(pid, "syscall")

    try:
        before = switches()
        is_still = _holds(lambda: switches() == before and not before.endswith(b"running\n"), WATCH_S)
    except (HookdError, OSError):
        return
    if is_still:
        cure = f"If it hangs: hookd attach --force {pid}. Otherwise attach waits: --timeout S."
        yield Check("main thread", "note", f"has not moved for {WATCH_S:g} s: {proc.whereabouts(pid)}", cure)
    else:
        yield Check("main thread", "ok", "responsive")


def _holds(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not condition():
            return False
        time.sleep(0.02)
    return True


def shown(checks: Sequence[Check], marks: dict[str, str]) -> Iterator[str]:
    """Yield the checks as lines that fit the screen: the result, and below it the remedy."""
    indent = max((len(check.name) for check in checks), default=0) + 4
    for check in checks:
        yield output.wrap(f"{marks[check.state]} {check.name}".ljust(indent) + check.found, " " * indent)
        if check.cure:
            yield output.wrap(" " * indent + check.cure, " " * indent)
