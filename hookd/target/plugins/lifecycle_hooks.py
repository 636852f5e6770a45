"""Lifecycle hooks, which no event calls: each runs in a helper thread with a timeout.

hookd's own thread answers requests and detaches, so a hook that never returns must not block it. The hook's thread cannot
be ended: it is left behind, and a detach reports where it is. Hooks of events run in the training's threads, where a hook
that never returns can only be reported (`hookd.target.plugins.slow_hooks`).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from hookd.errors import ControlError, PluginError, worded
from hookd.target.boot.spawn import Thread, is_own
from hookd.target.plugins.faults import Failure, is_from_signal_handler
from hookd.wire.originals import Empty, Event, SimpleQueue
from hookd.wire.plugin_frames import line_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookd.api.context import Context
    from hookd.api.events import Module
    from hookd.api.plugin import Plugin
    from hookd.target.boot.work import Work
    from hookd.target.plugins.accounts import Accounts
    from hookd.target.plugins.listeners import Loaded, Registry
    from hookd.target.plugins.notifier import Notifier
    from hookd.target.plugins.plugin_errors import Errors
    from hookd.wire.page import PageWriter

TIME_S = 5.0
"""Timeout of a hook: shorter than a tool's wait for an answer."""
SHORT_S = 1.0
"""Timeout of each `unconfigure` once a hook has timed out: the delays of all plugins together hold up a detach."""
IDLE_S = 3.0
"""Time without work after which a thread ends: longer than the interval of `tick`."""


class Job:
    """One call of a hook.

    Attributes:
        is_over: set when it has returned (`result`) or raised (`error`).
        where: the line in the plugin's source that it is at, if it has timed out; else None.
    """

    def __init__(self, plugin: Plugin, hook: str, act: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.plugin, self.hook = plugin, hook
        self._act, self._arguments = act, arguments
        self.is_over = Event()
        self.result: Any = None
        self.error: BaseException | None = None
        self.where: str | None = None

    def do(self) -> None:
        """Call the hook, in its helper thread."""
        try:
            self.result = self._act(*self._arguments)
        except BaseException as error:  # noqa: BLE001  the thread is ours alone, and no signal is handled in it
            self.error = error
        finally:
            self.is_over.set()

    @property
    def at(self) -> str:
        """The line that the hook is at, as the end of a sentence."""
        return f": it is at {self.where}" if self.where else ""

    @property
    def late(self) -> str:
        """The message that the hook has not returned."""
        return f"{self.hook} has not returned in time{self.at}"


class _Thread:
    """Runs jobs one after the other, until it is idle for `IDLE_S`, or a job has timed out."""

    def __init__(self, idle: list[_Thread], work: Work) -> None:
        self._idle, self._work = idle, work
        self.jobs: SimpleQueue[Job | None] = SimpleQueue()
        self.is_left = False
        self.thread = Thread(self._run)
        self.thread.start()

    def _run(self) -> None:
        while self._goes_on():
            pass

    def _goes_on(self) -> bool:
        """Run the next job; return whether to go on."""
        # In a frame of its own, so that an idle thread keeps no reference to its last job.
        try:
            job = self.jobs.get(timeout=IDLE_S)
        except Empty:
            try:
                self._idle.remove(self)
            except ValueError:  # another thread has just taken it for a job
                return not self.is_left
            return False
        if job is not None:
            with self._work.piece():
                job.do()
        return job is not None and not self.is_left


class LifecycleHooks:
    """Calls lifecycle hooks. Any thread may call, and waits."""

    def __init__(self, *, page: PageWriter, errors: Errors, work: Work) -> None:
        self._page, self._errors, self._work = page, errors, work
        self._idle: list[_Thread] = []
        self._left: list[tuple[_Thread, Job]] = []

    # -- the hooks

    def call(self, plugin: Plugin, hook: str, act: Callable[..., Any], *arguments: Any) -> Any:
        """Call a plugin's function, and return its result.

        Raises:
            PluginError: reason "stuck": it has not returned in time. Also whatever it raises, if that is an Exception or
                SystemExit; anything else becomes a RuntimeError, because no caller here could handle it.
        """
        job = self._done(plugin, hook, act, *arguments)
        if job.where is not None:
            hint = "Run slow work in context.aside(), and do not wait without a timeout."
            raise PluginError(f"{plugin.name}: {hook} has not returned in time{job.at}", reason="stuck", hint=hint)
        if isinstance(job.error, Failure):
            raise job.error
        if job.error is not None:
            raise RuntimeError(worded(job.error)).with_traceback(job.error.__traceback__) from job.error
        return job.result

    def configure(self, plugin: Plugin, context: Context) -> None:
        """Call `configure`, in which a plugin reads its options and declares its metrics; raises what `call` raises."""
        if hasattr(plugin, "configure"):
            self.call(plugin, "configure", plugin.configure, context)

    def select(self, plugin: Any, module: Module) -> Any:
        """Call `select` for a module: directly in the training's threads, with a timeout in hookd's own."""
        if self.holds(plugin):
            return False
        if not is_own():
            return plugin.select(module)
        return self.call(plugin, "select", plugin.select, module)

    def succeed(self, old: Loaded, new: Loaded) -> None:
        """Call `succeed`, in which a plugin takes over the state of the one that it replaces."""
        if hasattr(new.plugin, "succeed"):
            self.run(new, "succeed", new.plugin.succeed, old.plugin)

    def unconfigure(self, loaded: Loaded) -> None:
        """Call `unconfigure`, in which a plugin releases its resources; its errors are only logged."""
        if not hasattr(loaded.plugin, "unconfigure"):
            return
        time_s = SHORT_S if self._left else TIME_S
        job = self._done(loaded.plugin, "unconfigure", loaded.plugin.unconfigure, time_s=time_s)
        if job.where is not None:
            self._page.log("error", f"{loaded.name}: {job.late}; that thread is left behind")
        elif job.error is not None:
            self._page.log("error", f"{loaded.name}: unconfigure raised {worded(job.error)}")

    def run(self, loaded: Loaded, hook: str, act: Callable[..., Any], *arguments: Any) -> None:
        """Call a hook and count its errors, TrainingError included, as no training code could take it; quarantine it if it is stuck."""
        job = self._done(loaded.plugin, hook, act, *arguments)
        if job.where is not None:
            self._errors.late(loaded, job.hook, job.late, job.where)
        elif job.error is not None:
            self._errors.failed(loaded, job.hook, job.error)

    # -- the threads

    def _done(
        self, plugin: Plugin, hook: str, act: Callable[..., Any], *arguments: Any, time_s: float | None = None
    ) -> Job:
        job = Job(plugin, hook, act, arguments)
        try:
            thread = self._free()
        except ControlError:  # no thread can be started: run it here without a timeout, because a detach must complete
            job.do()
            if job.error is not None and is_from_signal_handler(job.error):
                raise job.error from None
            return job
        thread.jobs.put(job)
        try:
            job.is_over.wait(TIME_S if time_s is None else time_s)
        finally:  # in the main thread a signal handler may raise
            if job.is_over.is_set():
                self._idle.append(thread)
            else:
                thread.is_left = True
                job.where = line_of(thread.thread.ident, plugin)
                self._left.append((thread, job))
        return job

    def _free(self) -> _Thread:
        try:
            return self._idle.pop()
        except IndexError:
            return _Thread(self._idle, self._work)

    def holds(self, plugin: object) -> bool:
        """Whether a hook of a plugin has timed out and still not returned."""
        return any(job.plugin is plugin and not job.is_over.is_set() for _, job in self._left)

    def residue(self) -> list[str]:
        """Return descriptions of the threads that still run when the agent leaves."""
        residue = []
        for thread, job in self._left:
            if not job.is_over.is_set():
                at = line_of(thread.thread.ident, job.plugin)
                residue.append(f"a thread in the hook {job.hook} of the plugin {job.plugin.name}, at {at}")
        return residue

    def halt(self) -> None:
        """End the idle threads, without waiting for them."""
        while self._idle:
            with contextlib.suppress(IndexError):  # another thread has taken it
                self._idle.pop().jobs.put(None)

    def close(self) -> None:
        """End the idle threads, and wait for them."""
        while self._idle:
            thread = self._idle.pop()
            thread.jobs.put(None)
            thread.thread.join(TIME_S)


class _Outside:
    """Stands for the state of a thread that calls no modules."""

    busy = False


class PluginTicks:
    """Calls the hook `tick`."""

    def __init__(
        self, *, registry: Registry, notifier: Notifier, accounts: Accounts, lifecycle_hooks: LifecycleHooks
    ) -> None:
        self._registry, self._notify, self._accounts = registry, notifier.notify, accounts
        self._lifecycle_hooks = lifecycle_hooks

    def tick(self, now_s: float) -> None:
        """Call `tick` of all plugins that are switched on, in pluggy's order."""
        for listener in self._registry.ordered("tick"):
            loaded = self._registry.get(listener.plugin)
            if loaded is not None and listener.is_on:
                self._lifecycle_hooks.run(
                    loaded, "tick", self._notify, _Outside(), [listener], {"now_s": now_s}, self._accounts.is_metered
                )
