"""The daemon service: its tasks and their lifetimes, from the first bind to the last close. asyncio, one process."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from aiohttp import web

from hookd.errors import HookdError, PermissionDenied, UsageError, worded
from hookd.tool.config import default_control_path, default_state_dir
from hookd.tool.daemon import api, attach_scheduler, audit, describe
from hookd.tool.daemon.actions import Actions, Order
from hookd.tool.daemon.auto_attach import AutoAttach
from hookd.tool.daemon.client import EMBEDDED_SOCKET
from hookd.tool.daemon.evaluate import evaluate, require_allowed
from hookd.tool.daemon.fingerprints.keeper import Keeper
from hookd.tool.daemon.fleet.fleet import Fleet
from hookd.tool.daemon.fleet.history import History
from hookd.tool.daemon.incidents.store import IncidentStore
from hookd.tool.daemon.incidents.webhook import Sender
from hookd.tool.daemon.metrics.collector import AttachCounter, FleetCollector
from hookd.tool.daemon.metrics.selection import Limits
from hookd.tool.daemon.plugins import host
from hookd.tool.daemon.plugins.discovery import without_torch
from hookd.tool.daemon.watch.watchers import watchers
from hookd.tool.daemon.web import tcp
from hookd.tool.daemon.web.site import Web
from hookd.version import __version__

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from typing_extensions import Self

    from hookd.tool.config import ServeConfig
    from hookd.tool.config.values import Address
    from hookd.tool.daemon.attach_scheduler import PendingAttach
    from hookd.tool.daemon.fleet.targets import Target
    from hookd.tool.daemon.incidents.receivers import Receiver
    from hookd.wire.agent import Caller
    from hookd.wire.answer import Attached, ChangedTarget, DetachedTarget, EvaluatedTarget
    from hookd.wire.report import Report
    from hookd.wire.target import ErrorRow, ServerStatus, TargetRow

EMBEDDED_LEASE_S = 60.0
"""Lease of a foreground attach: how long its agents stay after it was killed."""
EMBEDDED_RETENTION_DAYS, EMBEDDED_RETENTION_MB = 365.0, 1000.0
"""Minimum retention of a foreground attach: it shares the incident file with `hookd serve`, whose settings it does not know."""
ATTACH_THREADS = 16
POLL_THREADS = 4
DEATH_THREADS = 2
DAY_S = 86400.0
PRUNE_RETRIES_S = 60.0
SENDER_PAUSE_S = 60.0
"""Pause after a sender of webhooks has ended by an error."""
OWN_DETACH_TIMEOUT_S = 10.0
"""Timeout of each detach at the end of a foreground attach."""
_log = logging.getLogger(__name__)
T = TypeVar("T")


class Service:
    """A daemon: binds its sockets, finds targets, polls and serves them. An async context manager.

    Call everything but `report` from its event loop, and `report` from a thread: it blocks.

    Args:
        only: pids to serve, for a foreground attach; None for every process.

    Attributes:
        url: TCP address it listens on, with the port that the kernel chose.
        control: path of its control socket.
        history: the last minutes of its targets.
        fingerprints: those of its targets, and of earlier ones.
    """

    def __init__(
        self, config: ServeConfig, *, only: Collection[int] | None = None, environ: Mapping[str, str] | None = None
    ) -> None:
        environ = os.environ if environ is None else environ
        self.config = config
        self.is_embedded = only is not None
        self.control = config.control or self._default_control(environ)
        self.url = ""
        self._scanned = asyncio.Event()  # once
        state_dir = config.state_dir or default_state_dir(environ, os.geteuid())
        store = IncidentStore.open(
            state_dir, max_bytes=self._at_least(config.retention_mb, EMBEDDED_RETENTION_MB) * 1e6
        )
        self.fleet = Fleet(store, linger_s=config.linger_s, only=only, per_user=config.targets_per_user)
        self._senders = [Sender(webhook, store, lambda: self.url) for webhook in config.webhooks]
        self.plugins = host.load(config)
        self._plugin_receivers = self.plugins.receivers(store)
        receivers: list[Receiver] = [*self._senders, *self._plugin_receivers]
        for receiver in receivers:
            store.listen(receiver)
        self._attach_counter = AttachCounter()
        lease_s = EMBEDDED_LEASE_S if self.is_embedded else config.lease_s
        self._actions = Actions(self.fleet, self._attach_counter, config, lease_s)
        self._limits = Limits.of(config)
        self._auto_attach = AutoAttach(config.rules, self.fleet.store.is_dismissed)
        self.history = History()
        last_session_dir = None if self.is_embedded else state_dir
        self.fingerprints = Keeper(self.fleet, last_session_dir, int(config.fingerprints_mb * 1e6))
        self._watchers = watchers(self.fleet, config, last_session_dir, self.history, self.fingerprints)
        self._collector = FleetCollector(
            self.fleet, self._attach_counter, self._limits, self._auto_attach.backing_off, watchers=self._watchers,
            is_fleet=bool(config.rules), kinds=self.fleet.admission.kinds, more=self.plugins.families,
        )  # fmt: skip
        self._started = time.time()
        self._attach_pool = ThreadPoolExecutor(ATTACH_THREADS, "hookd-attach")
        # A separate pool, so that attaches by rule do not delay those that a user asks for.
        self._rule_pool = ThreadPoolExecutor(attach_scheduler.MOST, "hookd-rule")
        # Shut down with waiting: a poll that runs after targets and store are closed would conclude that all targets have ended.
        self._poll_pool = ThreadPoolExecutor(POLL_THREADS, "hookd-poll")
        # Separate, so that many deaths at once do not delay polls.
        self._death_pool = ThreadPoolExecutor(DEATH_THREADS, "hookd-death")
        self._attempts: set[asyncio.Task[None]] = set()
        self._may_attach = asyncio.Event()
        self._watched: dict[int, Target] = {}
        self._new: list[Target] = []
        self._stack = contextlib.AsyncExitStack()

    def _default_control(self, environ: Mapping[str, str]) -> Path:
        """Return the default socket path; an embedded daemon gets its own, as the default belongs to `hookd serve`.

        The pid alone is not a unique name: containers that share the directory may have daemons with the same pid.
        """
        path = default_control_path(environ, os.geteuid())
        name = EMBEDDED_SOCKET.format(f"{os.getpid()}-{secrets.token_hex(4)}")
        return path.with_name(name) if self.is_embedded else path

    def _at_least(self, setting: float, embedded: float) -> float:
        return max(setting, embedded) if self.is_embedded else setting

    async def __aenter__(self) -> Self:
        """Bind both sockets, scan for targets once, and start the periodic tasks.

        Raises:
            HookdError: reason "already-running", "address-in-use", "address-not-allowed", "no-such-address", "control-socket" or
                "no-otlp".
        """
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self.fleet.store.close)
            stack.push_async_callback(asyncio.to_thread, self.plugins.close)
            stack.enter_context(without_torch())
            for receiver in self._plugin_receivers:
                stack.callback(receiver.close)
                await asyncio.to_thread(receiver.catch_up)
            stack.callback(self._attach_pool.shutdown)
            stack.callback(self._rule_pool.shutdown, cancel_futures=True)
            stack.callback(self._close_targets)
            stack.push_async_callback(asyncio.to_thread, self.fingerprints.close)
            stack.callback(self._poll_pool.shutdown)
            stack.callback(self._death_pool.shutdown)
            stack.push_async_callback(asyncio.to_thread, self._release_all)
            listener = self._bind_control(stack)
            await self._bind_tcp(stack)
            await self._serve_control(listener, stack)  # last: a client that gets an answer may use everything
            await self._scan()
            self._scanned.set()
            self._start_otlp(stack)
            for work, interval_s in (
                (self._poll, self.config.poll_s),
                (self._scan, self.config.scan_s),
                (self._attach_wanted, 0.0),
                (self._adopt, self.config.scan_s),
                (self._prune_retries, PRUNE_RETRIES_S),
                (self._delete_old_incidents, DAY_S),
                *((sender.run, SENDER_PAUSE_S) for sender in self._senders),
            ):
                task = asyncio.create_task(_repeat(work, interval_s))
                stack.push_async_callback(_end, task)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def _start_otlp(self, stack: contextlib.AsyncExitStack) -> None:
        """Send metrics to a collector, if there is one.

        Raises:
            UsageError: reason "no-otlp": the extra is not installed.
        """
        if not self.config.otlp_endpoint:
            return
        try:
            from hookd.tool.daemon.metrics.otlp import OtlpSender  # noqa: PLC0415  few have a collector
        except ImportError as exc:
            raise UsageError(
                "otlp_endpoint is set, but OpenTelemetry's exporter is not installed",
                reason="no-otlp",
                hint="Install it into hookd's environment: pip install 'hookd[otlp]'.",
            ) from exc
        sender = OtlpSender(self._collector, self.config.otlp_endpoint)
        stack.callback(sender.close)
        sender.start(self.config.otlp_interval_s)

    def _bind_control(self, stack: contextlib.AsyncExitStack) -> socket.socket:
        listener = api.bind(self.control)
        stack.callback(listener.close)
        stack.callback(self.control.unlink, missing_ok=True)
        return listener

    async def _serve_control(self, listener: socket.socket, stack: contextlib.AsyncExitStack) -> None:
        runner = web.AppRunner(api.Api(self).app(), handle_signals=False, shutdown_timeout=2, **tcp.HTTP)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        tcp.refusing(runner)
        await web.SockSite(runner, listener).start()

    async def _bind_tcp(self, stack: contextlib.AsyncExitStack) -> None:
        listen = self.config.listen
        app = Web(self, self._collector).app()
        try:
            serving = tcp.serving(app, listen, self.config.web_config, allow_hosts=self.config.allow_hosts)
            self.url = await stack.enter_async_context(serving)
        except OSError as exc:
            raise _cannot_listen(listen, exc) from exc

    def _release_all(self) -> None:
        """Release all leases; the agents stay for their lease time, or as long as another daemon holds them."""
        for target in self.fleet.targets():
            target.release()

    def _close_targets(self) -> None:
        for pidfd in self._watched:
            asyncio.get_running_loop().remove_reader(pidfd)
        self.fleet.close()

    # ---- periodic tasks

    async def _scan(self) -> None:
        new, found = await asyncio.get_running_loop().run_in_executor(self._poll_pool, self.fleet.scan)
        self._new += new
        self._watch_pidfds()
        if not self.is_embedded:
            await asyncio.to_thread(self._auto_attach.see, found)
            self._may_attach.set()

    async def _attach_wanted(self) -> None:
        """Start the next attaches by rule after each scan and each finished attempt."""
        await self._may_attach.wait()
        self._may_attach.clear()
        for attach in await asyncio.to_thread(self._auto_attach.due):
            task = asyncio.create_task(self._try(attach))
            self._attempts.add(task)
            task.add_done_callback(self._attempts.discard)

    async def _try(self, attach: PendingAttach) -> None:
        """Attach by rule; count and log a failure, and retry it later."""
        order = Order(plugins=attach.rule.plugins or None, timeout_s=self.config.timeout_s, only_trainers=True)
        try:
            answer = await asyncio.get_running_loop().run_in_executor(
                self._rule_pool, self._actions.attach, attach.pid, order
            )
        except HookdError as error:
            await asyncio.to_thread(self._auto_attach.failed, attach, error)
        except Exception as exc:  # noqa: BLE001  a bug: reported and retried like any other failure
            _log.exception("process %d", attach.pid)
            await asyncio.to_thread(self._auto_attach.failed, attach, HookdError(worded(exc), reason="internal"))
        else:
            self._auto_attach.attached(attach)
            await asyncio.to_thread(audit.attached, answer, f"by {attach.rule.description}")
        self._may_attach.set()
        self._watch_pidfds()

    async def _adopt(self) -> None:
        new, self._new = self._new, []
        if not self.is_embedded:
            await asyncio.to_thread(self._actions.adopt_orphans, new)

    async def _poll(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._poll_pool, self._poll_targets)
        self._watch_pidfds()

    def _poll_targets(self) -> None:
        self.fleet.poll()
        targets = self.fleet.targets()
        for watcher in self._watchers:
            watcher.poll(targets)
        self.plugins.poll(targets)

    async def _prune_retries(self) -> None:
        await asyncio.to_thread(self._auto_attach.prune)

    async def _delete_old_incidents(self) -> None:
        days = self._at_least(self.config.retention_days, EMBEDDED_RETENTION_DAYS)
        await asyncio.to_thread(self.fleet.forget, days * DAY_S)

    def _watch_pidfds(self) -> None:
        """Watch the pidfd of each live target, to notice its death at once; stop watching ended ones."""
        loop = asyncio.get_running_loop()
        alive = [target for target in self.fleet.targets() if target.ended is None or target.state == "corrupt"]
        served = {target.pidfd: target for target in alive if target.pidfd >= 0}
        for pidfd, target in list(self._watched.items()):
            if served.get(pidfd) is not target:
                self._unwatch(pidfd, target)
        for pidfd, target in served.items():
            if pidfd not in self._watched:
                self._watched[pidfd] = target
                loop.add_reader(pidfd, self._died, pidfd, target)

    def _unwatch(self, pidfd: int, target: Target) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        del self._watched[pidfd]
        target.close()

    def _died(self, pidfd: int, target: Target) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        asyncio.get_running_loop().run_in_executor(self._death_pool, self.fleet.lose, target)

    # ---- requests

    @property
    def is_ready(self) -> bool:
        """Whether it has scanned for targets once."""
        return self._scanned.is_set()

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Wait for the first scan, so that a restart does not look like the end of the known targets."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._scanned.wait(), timeout_s)

    def rows(self) -> list[TargetRow]:
        """Return the summary rows of all targets."""
        return [describe.target_row(target) for target in self.fleet.targets()]

    def report(self, pid: int, *, has_curve: bool = False) -> Report:
        """Return the report of a target, with `has_curve` including the times of its last steps. Blocks on its page.

        Raises:
            NoSuchTarget: the process is not a target.
        """
        target = self.fleet.get(pid)
        report = describe.target_report(target, self._limits)
        if has_curve:
            report["curve"] = target.curve()
        return report

    def status(self) -> ServerStatus:
        """Return the state of the daemon and the rows of its targets."""
        return {
            "version": __version__,
            "pid": os.getpid(),
            "url": self.url,
            "control": str(self.control),
            "started": self._started,
            "is_embedded": self.is_embedded,
            "rules": len(self.config.rules),
            "backing_off": self._auto_attach.backing_off(),
            "targets": self.rows(),
        }

    async def attach(self, pid: int, order: Order, by: Caller) -> Attached:
        """Attach to a process at a user's request; see `Actions.attach`."""
        self._auto_attach.reset(pid)
        answer = await self._run(self._actions.attach, pid, order, by)
        await asyncio.to_thread(audit.attached, answer, "as asked", by)
        await asyncio.to_thread(self.fleet.store.recall, pid)
        return answer

    async def attach_all(self, pids: Sequence[int], order: Order) -> list[Attached | ErrorRow]:
        """Attach to several processes concurrently; return the result or the error of each.

        Plugins that change the training are loaded after all attaches, because all ranks of a job must agree on the step.
        """
        at_once, later = self._actions.apart(order) if len(pids) > 1 else (order, ())
        results = list(await asyncio.gather(*(self._tried(self._actions.attach, pid, at_once) for pid in pids)))
        for spec in later:
            await asyncio.to_thread(self._actions.enable_together, results, spec, order)
        return results

    async def detach(self, pid: int, timeout_s: float, by: Caller) -> DetachedTarget:
        """Detach from a process at a user's request; see `Actions.detach`."""
        return await self._run(self._actions.detach, pid, timeout_s, by)

    async def detach_all(self, timeout_s: float, by: Caller) -> list[DetachedTarget | ErrorRow]:
        """Detach from all targets concurrently; return the result or the error of each."""
        pids = [target.pid for target in self.fleet.targets() if target.ended is None]
        return list(await asyncio.gather(*(self._tried(self._actions.detach, pid, timeout_s, by) for pid in pids)))

    async def detach_own(self) -> list[DetachedTarget | ErrorRow]:
        """Detach the targets that only this daemon holds, at the end of a foreground attach."""
        held = [target for target in self.fleet.targets() if target.ended is None and target.lease is not None]
        return list(await asyncio.gather(*(self._tried(self._detach_unless_held, target) for target in held)))

    def _detach_unless_held(self, target: Target) -> DetachedTarget:
        if self._actions.is_held_by_others(target):
            target.release()
            return {"pid": target.pid, "restored": None, "residue": [], "left": "another daemon holds it"}
        return self._actions.detach(target.pid, OWN_DETACH_TIMEOUT_S)

    async def change_plugins(self, pid: int, body: Mapping[str, object], by: Caller) -> ChangedTarget:
        """Load, unload, reload or configure a plugin; see `Actions.change_plugins`."""
        return await self._run(self._actions.change_plugins, pid, body, by)

    async def evaluate(self, pid: int, body: Mapping[str, object], by: Caller) -> EvaluatedTarget:
        """Evaluate an expression in a target, if the configuration allows it; see `hookd.tool.daemon.evaluate`."""
        require_allowed(pid, by, allowed=self.config.eval_allow, is_embedded=self.is_embedded)
        self.fleet.get(pid)
        return await asyncio.to_thread(evaluate, pid, body, by)

    async def _run(self, work: Callable[..., T], *arguments: object) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._attach_pool, work, *arguments)
        finally:
            self._watch_pidfds()

    async def _tried(self, work: Callable[..., T], target: Target | int, *arguments: object) -> T | ErrorRow:
        pid = target if isinstance(target, int) else target.pid
        try:
            return await self._run(work, target, *arguments)
        except HookdError as exc:
            return {"pid": pid, **exc.as_json()}


def _cannot_listen(listen: Address, exc: OSError) -> HookdError:
    # asyncio's message repeats the address; a failed name lookup has no errno of the kernel's.
    why = os.strerror(exc.errno) if exc.errno and exc.errno > 0 else exc.strerror
    hint = "Choose another with --listen, port 0 for any."
    if isinstance(exc, PermissionError):
        hint = "Only root may listen on a port below 1024: choose a higher one with --listen."
        return PermissionDenied(f"cannot listen on {listen} ({why})", reason="address-not-allowed", hint=hint)
    if exc.errno == errno.EADDRINUSE:
        return HookdError(f"cannot listen on {listen} ({why})", reason="address-in-use", hint=hint)
    return HookdError(f"cannot listen on {listen} ({why})", reason="no-such-address", hint=hint)


async def _repeat(work: Callable[[], Awaitable[None]], interval_s: float) -> None:
    """Run the work forever; log a round that fails and continue."""
    while True:
        try:
            await work()
        except Exception:  # noqa: BLE001  the daemon must keep serving
            _log.exception("%s", getattr(work, "__name__", work))
        await asyncio.sleep(interval_s)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
