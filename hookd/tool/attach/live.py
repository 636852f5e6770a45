"""Attach to a running process. Blocking.

The steps: inspect the process; join its agent, if it has one; build the payload; queue the code; wait until the code takes the
mailbox; send the payload; wait for the agent's answer; read its page.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from typing import TYPE_CHECKING, Any

from hookd import errors
from hookd.errors import AttachError, HookdError, PermissionDenied
from hookd.tool.attach import control, discover, payload, target, trusted, upgrade
from hookd.tool.attach.change import carried, change
from hookd.tool.attach.delivery import Delivery, ScriptDelivery, StopDelivery
from hookd.tool.attach.request import AttachRequest, AttachResult
from hookd.tool.inject import mailbox, remote_debug
from hookd.tool.linux import oom, permission, proc
from hookd.wire.tested_versions import untested, version_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hookd.wire.agent import AgentConfig, Message, Started
    from hookd.wire.identity import Identity

_MARGIN_S = 5.0
_QUICK_S = 0.05
_GATE_S = 3.0
_TRIES = 30
_SHORT = {mailbox.NO_THREAD: "no-threads", mailbox.NO_MEMORY: "no-memory"}


def attach(pid: int, request: AttachRequest) -> AttachResult:
    """Load an agent into process `pid`, or join its existing agent.

    Raises:
        NoSuchTarget, PermissionDenied, TargetUnsupported, AttachError, PluginError, ControlError: with a `reason` and
            a `hint`. In any case the process continues as before.
    """
    started = time.monotonic()
    deadline = started + request.timeout_s
    target.require_awake(pid)
    with _explaining(pid):
        there = discover.settled(pid, request.timeout_s)
    if there is not None and upgrade.is_ours(there):
        return _join(pid, request, there, started)
    if there is not None:
        request = upgrade.plan(pid, request, there)
    with target.inspect(pid, is_forced=request.force) as process, _detecting_oom_kill(pid):
        built = payload.build(request.plugins, request.plugin_dirs, trusted.of_target(process.status.uid))
        with _explaining(pid):
            delivery, data = _prepare(process, request, built)
            try:
                if there is not None:
                    upgrade.send_away(pid, request.timeout_s)
                _deliver(process, request, delivery, data, deadline)
            except AttachError as exc:
                rival = _await_rival(pid, deadline) if exc.reason == "already-attached" else None
                if rival is None:
                    raise
                return _join(pid, request, rival, started)  # another tool attached first
            finally:
                delivery.finish()
            here = discover.identity(pid)
    if here is None:
        raise AttachError(f"the agent in process {pid} ended at once", reason="died", hint="Try again.")
    return AttachResult(
        pid, delivery.method, delivery.pause_s, time.monotonic() - started, control.path(pid, str(here["control"])), here,
        loaded=tuple(spec.name for spec in request.plugins), replaced=str(there["agent_version"]) if there else "",
        payload=built.sha256, untested=untested(version_text(process.python.version), str(here.get("torch"))), carried={str(plugin["name"]): carried(plugin) for plugin in built.plugins},
    )  # fmt: skip


@contextlib.contextmanager
def _detecting_oom_kill(pid: int) -> Iterator[None]:
    """Distinguish an OOM kill from any other end of the process.

    Raises:
        AttachError: reason "oom-killed" instead of "died", if the kernel has made an OOM kill in the process's cgroup meanwhile.
    """
    counter = oom.counter_of(pid)
    before = oom.kills(counter) if counter is not None else None
    try:
        yield
    except AttachError as exc:
        if exc.reason == "died" and counter is not None and before is not None and (oom.kills(counter) or 0) > before:
            raise AttachError(
                f"process {pid} {oom.KILLED} while hookd was attaching", reason="oom-killed",
                hint="Raise the limit of its container or job.",
            ) from exc  # fmt: skip
        raise


def _await_rival(pid: int, deadline: float) -> Identity | None:
    """Wait for the agent that another tool is loading; None if it does not start in time."""
    while (there := discover.settled(pid, deadline - time.monotonic())) is None and time.monotonic() < deadline:
        time.sleep(_QUICK_S)
    return there


def _join(pid: int, request: AttachRequest, there: Identity, started: float) -> AttachResult:
    """Use the existing agent: enable the requested plugins that it lacks."""
    added, brought = [], {}
    with control.Control.connect(pid, request.timeout_s) as connection:
        status = connection.status()
        had = [str(plugin["name"]) for plugin in status.get("plugins", ())]
        holders = tuple(holder for holder in status.get("holders", ()) if type(holder) is int and holder != os.getpid())
        for spec in request.plugins:
            if spec.name in had:
                if spec.options:
                    change(pid, "configure", spec, request.plugin_dirs, request.timeout_s)
                continue
            brought[spec.name] = carried(change(pid, "load", spec, request.plugin_dirs, request.timeout_s))
            added.append(spec.name)
        if request.lease_s is None:
            connection.request("keep")
    return AttachResult(
        pid, "existing", 0.0, time.monotonic() - started, control.path(pid, str(there["control"])), there,
        loaded=(*had, *added), added=tuple(added), holders=holders, carried=brought,
    )  # fmt: skip


def _prepare(process: target.Target, request: AttachRequest, built: payload.Payload) -> tuple[Delivery, bytes]:
    """Return the delivery to use, and the data.

    The target is not changed yet.
    """
    token = secrets.randbits(63) | 1
    wait_s = request.timeout_s + _MARGIN_S
    remote = remote_debug.find(process.memory, process.python)
    config: AgentConfig = {
        "method": "attach",
        "run": request.run,
        "rank": None,
        "plugins": list(built.plugins),
        "lease_s": request.lease_s,
        "budget": request.budget,
        "detail": request.detail,
        "by": {"uid": os.getuid(), "pid": os.getpid()},
        "token": f"{token:016x}",
    }

    message: Message = {
        "config": config,
        "timeout_s": request.timeout_s,
        "wait_s": wait_s,
        "only_trainers": request.only_trainers,
    }
    data = mailbox.data(payload.stub(), message, built.archive)
    size = mailbox.DATA + len(data) + 4096
    if remote is not None and not request.force:
        if not remote.is_enabled:
            raise PermissionDenied(
                f"remote debugging is switched off in process {process.pid}", reason="remote-debug-disabled",
                hint="It was started with PYTHON_DISABLE_REMOTE_DEBUG or -X disable-remote-debug. --force overrides it.",
            )  # fmt: skip
        with contextlib.suppress(OSError):  # without a directory for the script, use a stop
            folder = remote_debug.ScriptFolder(process.status)
            with contextlib.ExitStack() as undo:
                undo.callback(folder.remove)
                # The folder was found by pid: check that it is this program's.
                proc.require_program(process.pid, process.program)
                undo.pop_all()
            return ScriptDelivery(process, remote, folder, token=token, size=size, wait_s=wait_s), data
    return StopDelivery(process, token, size, wait_s), data


def _deliver(process: target.Target, request: AttachRequest, delivery: Delivery, data: bytes, deadline: float) -> None:
    """Queue the code, send the data and wait for the answer; withdraw the code if there is no answer."""
    queued = time.monotonic()
    delivery.queue()
    box, wait_s = delivery.box, request.timeout_s + _MARGIN_S
    box.expect(queued + wait_s)

    def answer() -> Started | None:
        asked = time.monotonic()
        if (word := mailbox.word(box, mailbox.STATE)) in _SHORT:
            raise _out_of_resources(process, word)
        if (reply := mailbox.answer(box)) is None:
            box.expect(asked + wait_s)
        return reply

    try:
        deadline = _await_start(process, request, delivery, deadline)
        box.write(mailbox.DATA, data)
        mailbox.set_word(box, mailbox.LENGTH, len(data))
        reply = _poll(process, answer, deadline)
        if reply is None and mailbox.word(box, mailbox.STATE) == mailbox.RUNS:  # it runs, but the machine is busy
            reply = _poll(process, answer, deadline + request.timeout_s)
        if reply is not None:
            mailbox.set_word(box, mailbox.SEEN, 1)
    except BaseException as exc:
        delivery.withdraw()
        if isinstance(exc, AttachError) and exc.reason in _SHORT.values():
            with contextlib.suppress(HookdError, OSError):
                delivery.again()  # this time the code frees the mailbox
        if isinstance(exc, OSError) and exc.errno in (errno.EFAULT, errno.ETIMEDOUT):
            raise _suspended(process) from exc
        raise
    if reply is None:
        raise _timed_out(process, request, delivery)
    if not reply.get("ok"):
        raise _refusal(reply)


def _timed_out(process: target.Target, request: AttachRequest, delivery: Delivery) -> AttachError:
    """Withdraw a delivery that was not answered in time; return the error that names how far it got."""
    runs = mailbox.word(delivery.box, mailbox.STATE) == mailbox.RUNS
    delivery.withdraw()
    where = proc.whereabouts(process.pid)
    if runs:
        return AttachError(
            f"the agent did not start in process {process.pid} within {2 * request.timeout_s:g} s ({where})", reason="timeout",
            hint="The machine may be busy, or torch still being imported: try again with a larger --timeout.",
        )  # fmt: skip
    return AttachError(
        f"a thread that was started in process {process.pid} did not run within {request.timeout_s:g} s ({where})",
        reason="timeout", hint="It gets no memory (RLIMIT_AS, vm.overcommit_memory=2), or no processor time.",
    )  # fmt: skip


def _out_of_resources(process: target.Target, word: int) -> AttachError:
    """Return the error for a target that could not create the agent's thread, or has no memory for it."""
    if word == mailbox.NO_THREAD:
        hint = "Raise pids.max of its container or job, its RLIMIT_NPROC, or its RLIMIT_AS (stacks count)."
        return AttachError(f"process {process.pid} cannot start another thread", reason="no-threads", hint=hint)
    return AttachError(f"process {process.pid} cannot get more memory", reason="no-memory", hint=mailbox.MORE_MEMORY)


def _suspended(process: target.Target) -> AttachError:
    return AttachError(
        f"hookd was suspended, and the attach to process {process.pid} timed out", reason="timeout", hint="Try again."
    )


def _await_start(process: target.Target, request: AttachRequest, delivery: Delivery, deadline: float) -> float:
    """Wait until the main thread has run the code.

    If it does not, queue the code a second time, and with `force` run it directly.

    Returns:
        The deadline for the remaining steps: a forced attach gets its timeout once more.

    Raises:
        AttachError: reasons "blocked", "subinterpreter".
    """
    now = time.monotonic()
    if _is_started(process, delivery, now + (deadline - now) / 3, request.timeout_s):
        return deadline
    delivery.again()
    if _is_started(process, delivery, deadline, request.timeout_s):
        return deadline
    where = proc.whereabouts(process.pid)
    if request.force and isinstance(delivery, StopDelivery) and _hangs(process.pid):
        delivery.run_on_blocked()
        deadline = time.monotonic() + request.timeout_s
        if _is_started(process, delivery, deadline, request.timeout_s):
            return deadline
    if _is_passed_over(delivery):
        raise AttachError(
            f"the main thread of process {process.pid} runs a subinterpreter, in which torch is not imported",
            reason="subinterpreter", hint="Try again when it is back in the main interpreter.",
        )  # fmt: skip
    raise AttachError(
        f"the main thread of process {process.pid} did not reach the interpreter within {request.timeout_s:g} s ({where})",
        reason="blocked",
        hint="It runs a long kernel, or waits for another rank or for the thread that trains. Try again with a larger --timeout; "
        "--force attaches to a thread that hangs in a system call.",
    )


def _is_started(process: target.Target, delivery: Delivery, deadline: float, timeout_s: float) -> bool:
    """Wait until the code has run in the interpreter that has torch.

    Before 3.12 a queued call runs in the interpreter in which the thread was stopped. If that was a subinterpreter, the code is
    queued again.
    """

    def is_started() -> bool:
        asked = time.monotonic()
        if mailbox.word(delivery.box, mailbox.STATE):
            return True
        delivery.box.expect(asked + timeout_s + _MARGIN_S)  # the target's thread waits this long from its start on
        return False

    for _ in range(_TRIES):
        if not _poll(process, lambda: is_started() or _is_passed_over(delivery), deadline):
            return False
        if _poll(process, is_started, time.monotonic() + _QUICK_S):
            return True
        if time.monotonic() >= deadline:
            return False
        delivery.again()
    return False


def _is_passed_over(delivery: Delivery) -> bool:
    """Whether the code has run as often as it was queued."""
    return mailbox.word(delivery.box, mailbox.RAN) >= mailbox.word(delivery.box, mailbox.SENT)


def _hangs(pid: int) -> bool:
    """Whether the main thread has been in the same system call for some seconds, without waking up."""

    def where() -> tuple[bytes, bytes]:
        switches = [line for line in proc.read(pid, "status").split(b"\n") if line.startswith(b"voluntary_ctxt")]
        return proc.read(pid, "syscall"), b"".join(switches)

    before, since = where(), time.monotonic()
    end = since + 2 * _GATE_S
    while (now := time.monotonic()) < end and now - since < _GATE_S:
        time.sleep(_QUICK_S)
        here = where()
        if here != before or here[0].startswith(b"running"):
            before, since = here, time.monotonic()
    return now - since >= _GATE_S


def _poll(process: target.Target, question: Callable[[], Any], deadline: float) -> Any:
    """Poll until the answer is true or the deadline has passed; more often at first.

    Raises:
        AttachError: reason "died".
    """
    quick_until = time.monotonic() + _QUICK_S
    while True:
        try:
            answer = question()
        except OSError as exc:
            proc.require_alive(process.pid, process.ticks)
            if exc.errno == errno.EFAULT:  # the target has freed the mailbox
                raise
            raise permission.explain(process.pid, exc) from exc
        if answer or time.monotonic() > deadline:
            return answer
        if time.monotonic() < quick_until:
            time.sleep(0.0005)
        else:
            time.sleep(0.005)
            proc.require_alive(process.pid, process.ticks)


def _refusal(answer: Started) -> HookdError:
    """Rebuild the error that the target reports; its text is checked like all data of a target."""
    message, reason, hint = (answer.get(key, "") for key in ("message", "reason", "hint"))
    return errors.rebuild(answer.get("kind"), message or "refused", reason or "agent-failed", hint, AttachError)


@contextlib.contextmanager
def _explaining(pid: int) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise permission.explain(pid, exc) from exc
