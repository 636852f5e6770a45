"""The life of one agent: page, control socket, detach, fork and exit."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import posix
import sys
from typing import TYPE_CHECKING, Any

from hookd.api.plugin import Plugin
from hookd.errors import ControlError, PluginError, several_ranks, worded
from hookd.target.boot import foundation, installed
from hookd.target.boot.assembly import assemble
from hookd.target.boot.exit_exception import exit_exception, last_exception_id
from hookd.target.boot.fork import set_at_fork
from hookd.target.boot.forking import Forks
from hookd.target.boot.identity import Process, identity, ranks
from hookd.target.boot.loader import TAG_SEPARATOR, release
from hookd.target.boot.spawn import Thread, note_visitor
from hookd.target.boot.standby import Standby
from hookd.target.boot.work import Work
from hookd.target.entry import dynamo
from hookd.target.entry.threads import threads_inside
from hookd.target.plugins.background import DETACH_S, EXIT_S
from hookd.target.plugins.faults import Failure
from hookd.target.remote.control import Control
from hookd.target.remote.requests import Queries
from hookd.version import __version__
from hookd.wire.agreement import Agreement
from hookd.wire.originals import clock
from hookd.wire.page import PageWriter
from hookd.wire.tested_versions import untested

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hookd.target.plugins.listeners import Loaded
    from hookd.wire.agent import (
        AgentConfig,
        AgentStatus,
        Changed,
        Detached,
        PluginConfig,
        PluginStatus,
        Request,
        Source,
    )
    from hookd.wire.identity import PluginSettings

    Operation = Callable[[Request], Mapping[str, object]]

AGREED_END_S = 5.0
"""How long a detach waits for the step at which all ranks stop the plugins that change the training."""
LAST_NUMBERS_S = 2.0
"""Timeout, at the end of the process, of numbers that are still on a device: it may hang."""
TICK_END_S = 2.0
"""How long the end of the process waits for the current work of hookd's own threads."""
ORPHAN_S = 60.0
"""How long an agent stays that was to be kept, if the tool that attached it died before it saw the answer."""


class Agent:
    """The agent: owns its parts, page and control socket.

    Attributes:
        attached: time of the attach, in unix seconds.
        parts: the parts; only the agent and tests use this attribute, because each part gets what it needs at its creation.
    """

    def __init__(self, config: AgentConfig, loader: Any, on_left: Callable[[], None], clock: Callable[[], int]) -> None:
        self._config, self._loader, self._on_left = config, loader, on_left
        self._pid = posix.getpid()
        who = self._who = identity(config)
        self.attached = who["attached"]
        self._page = PageWriter.create(who)
        self._work = Work()
        rest, budget = (loader.rest if loader is not None else lambda: None), float(config.get("budget", 0.01))
        self.parts = assemble(self._page, Process.of(who), work=self._work, budget=budget, clock=clock, rest=rest)
        self._control: Any = None
        self._queries = Queries(self.parts.trees, self.parts.evaluations, lambda: self._control.asking)
        self._changing: Any = None
        self._is_kept = False
        self._detached: Detached | None = None
        self._leaving: Thread | None = None
        self._published: dict[str, PluginSettings] = {}
        self._known_exception = last_exception_id()

    def begin(self) -> None:
        """Load the plugins, patch torch, and listen for requests."""
        self.parts.rest()
        for spec in self._config.get("plugins", ()):
            self._load(spec)
        dynamo.skip_package(__name__.partition(".")[0], self.parts.rest)
        lease_s = self._config.get("lease_s")
        self._control = Control(
            self._handle, self._tick, lease_s, self._expired, self._work, closed_by_program=self._closed_by_program
        )
        self._control.left, self._control.poll = self._left, self.parts.slow_hooks.poll
        self._page.update_identity(control=self._control.path)
        self._publish_options()
        forks = Forks(self._control, self.parts.background, self.parts.lifecycle_hooks, self._silence)
        self.parts.boundaries.resume = forks.resume
        if self._config.get("method") == "attach":
            note_visitor()
        set_at_fork(forks.calls())
        atexit.register(self._exiting)
        self.parts.models.prepare()
        self.parts.arming.arm()
        self._control.start()
        self._page.set_state("running")
        if line := untested(self._who["python"], self._who["torch"]):
            self._page.log("info", line)

    def page(self) -> int:
        """Open the page again, for a reader in this process.

        Raises:
            OSError: the page is closed.
        """
        return self._page.duplicate()

    def _tick(self, now_s: float) -> None:
        tick, settle = functools.partial(self.parts.ticks.tick, now_s), self.parts.changes.settle
        for part in (self._find_rank, settle, self._publish_options, tick, self._queries.tick):
            try:  # this thread must continue, because it serves detach requests
                part()
            except Failure as failure:
                self.parts.errors.own_failure("tick", failure)

    def _publish_options(self) -> None:
        """Publish each plugin's options, and its settings including the defaults, in the page."""
        entries = [loaded for loaded in self.parts.registry if loaded.state != "waiting"]
        settings: dict[str, PluginSettings] = {
            loaded.name: {
                "options": dict(loaded.context.options),
                "settings": {k: _text(v) for k, v in list(loaded.context.settings.items()) if v is not None},
                "source": loaded.source,
                "error": loaded.last_error,
            }
            for loaded in entries
        }
        if settings != self._published:
            self._published = settings
            self._page.update_identity(plugins=settings)

    def _find_rank(self) -> None:
        """Publish the rank once torch.distributed knows it, which is often after the attach."""
        current, process = ranks(), self.parts.process
        if current is None or self._config.get("rank") is not None or current == (process.rank, process.world_size):
            return
        process.rank, process.world_size = current
        self._page.update_identity(rank=process.rank, world_size=process.world_size)

    # -- requests

    def _handle(self, request: Request) -> Mapping[str, object]:
        op = request.get("op", "")
        operations: dict[str, Operation] = {
            "status": self._status, "keep": self._keep, "load": self._load_live, "unload": self._unload,
            "reload": self._reload,
            "environment": lambda _: {"plugins": installed.installed()}, "configure": self._configure, "arm": self._arm, "abandon": self._abandon,
            "detach": self._detach_on_request, **self._queries.operations,
            **self.parts.tracing.operations(lambda: self._control.asking),
            **self.parts.streams.operations(lambda: self._control.asking),
        }  # fmt: skip
        if op not in operations:
            raise ControlError(f"no such op: {op!r}", reason="bad-request")
        return operations[op](request)

    def _status(self, _request: Request) -> AgentStatus:
        parts = self.parts
        change = parts.changes.describe()  # before `settle`: a change is reported as done only after its cleanup
        parts.changes.settle()
        self._publish_options()
        plugins: list[PluginStatus] = [
            {
                "name": e.name, "state": e.state, "mutates": e.plugin.mutates, "errors": e.errors,
                "last_error": e.last_error.get("text", ""), "interval": e.interval, "options": e.context.options, "by_name": e.by_name,
                "spent_s": e.spent_ns / 1e9, **e.source,
            }
            for e in parts.registry
        ]  # fmt: skip
        return {
            "version": __version__, "state": "running" if parts.life.is_live else "detaching", "pid": self._pid,
            "step": parts.count.done, "step_offset": parts.count.offset, "plugins": plugins,
            "modules": parts.models.size(), "why_patched": parts.models.observer.why_patched, "leases": self._control.leases,
            "holders": self._control.holders, "age_s": self._control.age_s,
            "torch": list(foundation.checks(sys.modules["torch"])),
            **change,
        }  # fmt: skip

    def _keep(self, _request: Request) -> Mapping[str, object]:
        self._is_kept = True
        self._control.keep()
        self._page.update_identity(keep=True)
        return {}

    # These operations are complete when they are answered, unless they concern a plugin that changes the training. Such a
    # change is only prepared, and takes place between two steps after `arm`.

    def _load_live(self, request: Request) -> Changed:
        self.parts.changes.require_idle()
        spec = request["plugin"] = self._found_here(request)
        with self._renewing(request):
            plugin, options = self._made(spec), dict(spec.get("options") or {})
            self.parts.loading.forget_stopped(plugin.name)
            loaded = self.parts.loading.ready(plugin, options, by_name=bool(spec.get("by_name")))
        loaded.source = source_of(spec)
        return {**self._change("load", None, loaded), **loaded.source}

    def _reload(self, request: Request) -> Changed:
        """Replace a plugin by a new one from new source. It gets the same options. On an error the old one stays."""
        self.parts.changes.require_idle()
        spec = request["plugin"] = self._found_here(request)
        old = self.parts.registry.named(str(spec["name"]))
        if self._loader is None:
            raise PluginError(f"{old.name} is imported by the program itself, not carried", reason="in-process",
                              hint="Restart the program.")  # fmt: skip
        with self._renewing(request):
            plugin = self._made(spec)
            if plugin.name != old.name:
                raise PluginError(f"the new source of {old.name} has another name: {plugin.name!r}")
            loaded = self.parts.loading.ready(plugin, dict(old.context.options), by_name=old.by_name, old=old)
        loaded.source = source_of(spec)
        return {**self._change("reload", old, loaded), **loaded.source}

    def _found_here(self, request: Request) -> PluginConfig:
        """Return the requested plugin's specification; a request without sources gets those of the plugin installed here."""
        spec = request["plugin"]
        if "entry" in spec or self._loader is None:
            return spec
        found, request["sources"] = installed.find(str(spec["name"]))
        return {**spec, **found}

    def _renewing(self, request: Request) -> contextlib.AbstractContextManager[None]:
        sources = request.get("sources") or {}
        renewing: contextlib.AbstractContextManager[None]
        renewing = self._loader.renewing(sources) if self._loader is not None else contextlib.nullcontext()
        return renewing

    def _unload(self, request: Request) -> Changed:
        self.parts.changes.require_idle()
        return self._change("unload", self.parts.registry.named(str(request.get("name"))), None)

    def _configure(self, request: Request) -> Changed:
        """Replace a plugin by a new one with other options. If it refuses them, the old one stays."""
        self.parts.changes.require_idle()
        loaded = self.parts.registry.named(str(request.get("name")))
        given = {k: str(v) for k, v in request.get("options", {}).items()}
        lifecycle_hooks, old = self.parts.lifecycle_hooks, loaded.plugin
        after = lifecycle_hooks.call(old, "changed", old.changed, loaded.context.options, given)
        if after == loaded.context.options:
            return {"options": after, "state": "done"}
        new = self.parts.loading.ready(type(loaded.plugin)(), after, by_name=loaded.by_name, old=loaded)
        new.source = loaded.source
        return {"options": after, **self._change("configure", loaded, new)}

    def _change(self, kind: str, old: Loaded | None, new: Loaded | None) -> Changed:
        parts, connection = self.parts, self._control.asking
        if (old is not None and old.changes_training) or (new is not None and new.plugin.mutates):
            parts.changes.prepare(kind, old, new, {"uid": connection.uid, "pid": connection.pid})
            self._changing = connection
            return {"state": "prepared", "ranks": parts.process.world_size, "rank": parts.process.rank}
        parts.loading.switch(old, new)
        if old is not None:
            parts.loading.discard(old, new)
        self._publish_options()
        return {"state": "done"}

    def _arm(self, request: Request) -> Mapping[str, object]:
        """Start the prepared change; with several ranks at the boundary `mark`, through the agreement in the request."""
        mark, files = request.get("mark"), self._control.asking.files
        agreement = Agreement(files.pop()) if files else None
        if (mark is None or agreement is None) and self.parts.process.world_size > 1:
            change = self.parts.changes.current
            raise several_ranks(change.name if change is not None else "", self.parts.process.world_size)
        self.parts.changes.arm(mark, agreement)
        return {}

    def _abandon(self, _request: Request) -> Mapping[str, object]:
        self.parts.changes.abandon()
        return {}

    def _left(self, connection: Any) -> None:
        """Abandon the change, the trace or the streams of a connection that was closed."""
        self.parts.tracing.left(connection)
        self.parts.streams.left(connection)
        if connection is self._changing:
            self._changing = None
            self.parts.changes.abandon()

    def _detach_on_request(self, request: Request) -> Detached:
        if self._control.asking.is_gone():  # the process was suspended meanwhile, and the tool has reported a timeout
            raise ControlError("the client has closed its connection", reason="bad-request")
        self._page.update_identity(sent_away=True)  # so that a daemon can tell this from an agent that leaves by itself
        result = self.detach(float(request.get("timeout", 10.0)))
        self._leave_soon()
        return result

    def _expired(self) -> None:
        self._page.log("info", "the last lease has expired: detaching")
        self.detach(10.0)
        self._leave_soon()

    def _closed_by_program(self) -> None:
        """Detach, because the agent is not reachable without its control socket, and another one can be attached."""
        self._page.log("warning", "the program has closed hookd's descriptors: detaching; attach again")
        self.detach(10.0)
        self._leave_soon()

    def _leave_soon(self) -> None:
        """Clean up at the end of the control thread. That thread calls this, and still has to send an answer."""
        self._control.end(then=self.leave)

    def orphan(self) -> None:
        """Detach when no lease is left. A later request to keep the agent prevents that."""
        if self._config.get("lease_s") is None and not self._is_kept:
            self._page.update_identity(keep=False)
            self._control.stay(ORPHAN_S)

    # -- plugins

    def _load(self, spec: PluginConfig) -> None:
        loaded = self.parts.loading.load(
            self._made(spec), dict(spec.get("options") or {}), by_name=bool(spec.get("by_name"))
        )
        loaded.source = source_of(spec)
        by = self._config.get("by") or {"uid": posix.getuid(), "pid": self._pid}
        self.parts.changes.loaded(loaded, by)

    def _made(self, spec: PluginConfig) -> Plugin:
        module, _, name = str(spec["entry"] if "entry" in spec else installed.entry_point(spec["name"])).partition(":")
        plain = module.partition(TAG_SEPARATOR)[0]
        try:
            home = importlib.import_module(plain) if self._loader is None else self._loader.module(module)
            kind = getattr(home, name)
        except (Exception, SystemExit) as exc:
            text = f"{spec['name']}: cannot be imported in the target: {worded(exc)}"
            raise PluginError(text) from exc
        if not (isinstance(kind, type) and issubclass(kind, Plugin)):
            raise PluginError(f"{spec['name']}: {plain}:{name} is not a subclass of hookd.Plugin")
        return kind()

    # -- the end

    def detach(self, timeout_s: float) -> Detached:
        """Restore torch, and wait until no thread is inside a frame of hookd's.

        Returns:
            `restored`: identity; pass-through (another patch is on top of hookd's); pending (a call that hookd observed is
            still running, and the page stays until it returns). `residue`: what could not be restored.
        """
        if self._detached is not None:
            return self._detached
        self._work.go_on()  # needed if another atexit function detaches after ours was called
        self.parts.tracing.abandon()
        # A training thread that calls `hookd.stop()` makes no step while it waits.
        is_own_thread = self._control is not None and self._control.is_own_thread()
        self.parts.changes.leave(min(timeout_s, AGREED_END_S) if is_own_thread else 0.0)
        self._page.set_state("detaching")
        restored = self.parts.arming.disarm()
        deadline = clock.monotonic() + timeout_s
        while threads_inside() and clock.monotonic() < deadline:
            clock.sleep(0.002)
        restored = "pending" if threads_inside() else restored
        ours = self.parts
        for loaded in ours.registry:
            ours.lifecycle_hooks.unconfigure(loaded)
        ours.streams.clear()
        residue = [
            *ours.tracing.residue, *ours.arming.residue, *ours.lifecycle_hooks.residue(), *ours.background.residue(ours.registry),
            *self._queries.residue(),
        ]  # fmt: skip
        self._detached = {"restored": restored, "residue": residue}
        return self._detached

    def _is_inside(self) -> bool:
        """Whether this thread is inside a call that stores to the page when it ends."""
        return self.parts.local.thread.top is not None

    def leave_outside(self) -> None:
        """Leave; if the caller is inside an observed call, in another thread, which waits for the end of that call."""
        if self._is_inside():
            if self._leaving is None:
                self._leaving = Thread(self.leave)
                self._leaving.start()
        elif self._leaving is not None:
            self._leaving.join(DETACH_S)
        else:
            self.leave()

    def leave(self) -> None:
        """Release the socket, the page and the payload, as the last act of the agent."""
        if self._detached is None:
            self.detach(10.0)
        set_at_fork(None)
        if self._control is not None:
            self._control.end()
        while threads_inside():  # an observed call still stores to the page
            clock.sleep(0.05)
        self.parts.models.observer.close()
        self.parts.numeric.close()
        self.parts.background.close(DETACH_S)
        self.parts.lifecycle_hooks.close()
        with contextlib.suppress(ValueError):
            self._page.set_state("detached")
        self.parts.changes.close()
        self._on_left()
        if self._loader is not None:
            self._loader.purge()
        release()
        atexit.unregister(self._exiting)
        self._page.close()  # last, because a waiting tool takes the end of the page for the end of the agent

    def _exiting(self) -> None:
        """Publish the end of the interpreter for readers that have the page open, and remove the socket file."""
        if self._detached is not None:  # the agent is leaving at this moment
            self._work.end(TICK_END_S)
            return
        with contextlib.suppress(*Failure):
            self.parts.steps.finish()
            self.parts.tracing.exiting()
            self._queries.exiting()
        with contextlib.suppress(*Failure):
            self.parts.numeric.later.finish(LAST_NUMBERS_S)
        self.parts.background.finish(EXIT_S)
        self._work.end(TICK_END_S)
        with contextlib.suppress(Exception):
            last = exit_exception(self._known_exception, self.parts.models.names.name_of)
            if last is not None:
                self._page.update_identity(exception=last)
        with contextlib.suppress(ValueError):
            self._page.set_state("exited")
        if self._control is not None:
            self._control.unlink()

    def _silence(self) -> None:
        """Disable the agent in a forked child; takes no lock. The child has no patches, page, socket or threads."""
        self.parts.life.is_live = False
        self.parts.tracing.forget()
        self.parts.streams.clear()
        self.parts.arming.restore_in_child()
        self.parts.changes.close()
        # If the fork was inside a module's forward, hookd's frames continue in this child, and store to the page at their end.
        if self._is_inside():
            self._page.sever()
        else:
            self._page.abandon()
        if self._control is not None:
            self._control.abandon()
        atexit.unregister(self._exiting)
        self._on_left()
        if self._config.get("method") == "run" and self._loader is not None:
            Standby(functools.partial(self._loader.again, self._config), self._config["directory"])


def source_of(spec: PluginConfig) -> Source:
    """Return the tool's information about a plugin's source: version, sha256 and origin."""
    source: Source = {}
    for key in ("version", "sha256", "origin"):
        if spec.get(key):
            source[key] = str(spec[key])
    return source


def _text(value: object) -> str:
    try:
        return str(value).lower() if isinstance(value, bool) else str(value)
    except Failure:  # the option has a class of the plugin's that fails; all other options are still published
        return type(value).__name__
