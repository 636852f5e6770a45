"""The hooks of plugins that no event calls: each in a thread that hookd's own does not wait for longer than its time. Runs in the target.

hookd's own thread answers requests and detaches, so a hook that never returns must not hold it. Its thread cannot be ended:
it is left behind, and a detach says where it is. Hooks that events call run in the training's threads, where nothing can be
done about one that never returns but to say so (`hookd.target.plugins.slow_hooks`).
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
    from hookd.target.plugins.listeners import Entry, Registry
    from hookd.target.plugins.plugin_errors import Errors
    from hookd.target.plugins.telling import Telling
    from hookd.wire.page import PageWriter

TIME_S = 5.0
"""How long a hook may take: shorter than what a tool waits for an answer. At a detach each but the first one that is late has"""
SHORT_S = 1.0
"""as long, for all of them together hold it up."""
IDLE_S = 3.0
"""After so long without work a thread ends: `tick` comes more often."""


class Job:
    """One call of a hook.

    Attributes:
        is_over: it has returned or raised: `result` or `error`.
        where: the author's line that it is at, if it has not returned in its time; else None.
    """

    def __init__(self, plugin: Plugin, hook: str, act: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.plugin, self.hook = plugin, hook
        self._act, self._arguments = act, arguments
        self.is_over = Event()
        self.result: Any = None
        self.error: BaseException | None = None
        self.where: str | None = None

    def do(self) -> None:
        """Call it, in the thread that is there for it."""
        try:
            self.result = self._act(*self._arguments)
        except BaseException as error:  # noqa: BLE001  it is nobody's thread but ours, and no signal is handled in it
            self.error = error
        finally:
            self.is_over.set()

    @property
    def at(self) -> str:
        """Say where it is, for the end of a sentence."""
        return f": it is at {self.where}" if self.where else ""

    @property
    def late(self) -> str:
        """Say that it has not returned."""
        return f"{self.hook} has not returned in time{self.at}"


class _Thread:
    """Does one job after the other, until it has nothing to do, or one has not returned in its time."""

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
        """Do the next job; in a frame of its own, which keeps nothing of it while there is none."""
        try:
            job = self.jobs.get(timeout=IDLE_S)
        except Empty:
            try:
                self._idle.remove(self)
            except ValueError:  # somebody has taken it just now
                return not self.is_left
            return False
        if job is not None:
            with self._work.piece():
                job.do()
        return job is not None and not self.is_left


class Cold:
    """Calls them. Any thread may ask, and waits.

    Args:
        errors: counts what they raise.
        work: of all threads of the agent.
    """

    def __init__(self, *, page: PageWriter, errors: Errors, work: Work) -> None:
        self._page, self._errors, self._work = page, errors, work
        self._idle: list[_Thread] = []
        self._left: list[tuple[_Thread, Job]] = []

    # -- the hooks

    def call(self, plugin: Plugin, hook: str, act: Callable[..., Any], *arguments: Any) -> Any:
        """Call something of a plugin's, and give what it returns.

        Raises:
            PluginError: reason "stuck": it has not returned in its time. Also whatever it raises, if that is an Exception or
                SystemExit; a RuntimeError in the place of anything else, which belongs to nobody here.
        """
        job = self._done(plugin, hook, act, *arguments)
        if job.where is not None:
            hint = "Do what takes its time in context.aside(), and wait for nothing that may not come."
            raise PluginError(f"{plugin.name}: {hook} has not returned in time{job.at}", reason="stuck", hint=hint)
        if isinstance(job.error, Failure):
            raise job.error
        if job.error is not None:
            raise RuntimeError(worded(job.error)).with_traceback(job.error.__traceback__) from job.error
        return job.result

    def configure(self, plugin: Plugin, context: Context) -> None:
        """Let a plugin read its options and declare its metrics; raises what `call` does."""
        if hasattr(plugin, "configure"):
            self.call(plugin, "configure", plugin.configure, context)

    def select(self, plugin: Any, module: Module) -> Any:
        """Ask a plugin whether it wants a module: in the training's thread at once, in hookd's own one in time."""
        if self.holds(plugin):
            return False
        if not is_own():
            return plugin.select(module)
        return self.call(plugin, "select", plugin.select, module)

    def succeed(self, old: Entry, new: Entry) -> None:
        """Let a plugin take over what the one before it knew."""
        if hasattr(new.plugin, "succeed"):
            self.run(new, "succeed", new.plugin.succeed, old.plugin)

    def unconfigure(self, entry: Entry) -> None:
        """Let a plugin let go; its errors no longer matter."""
        if not hasattr(entry.plugin, "unconfigure"):
            return
        time_s = SHORT_S if self._left else TIME_S
        job = self._done(entry.plugin, "unconfigure", entry.plugin.unconfigure, time_s=time_s)
        if job.where is not None:
            self._page.log("error", f"{entry.name}: {job.late}; that thread is left behind")
        elif job.error is not None:
            self._page.log("error", f"{entry.name}: unconfigure raised {worded(job.error)}")

    def run(self, entry: Entry, hook: str, act: Callable[..., Any], *arguments: Any) -> None:
        """Call a hook, and count what it raises, a TrainingError as well: there is no training code here. Quarantine one that is stuck."""
        job = self._done(entry.plugin, hook, act, *arguments)
        if job.where is not None:
            self._errors.late(entry, job.hook, job.late, job.where)
        elif job.error is not None:
            self._errors.failed(entry, job.hook, job.error)

    # -- the threads

    def _done(
        self, plugin: Plugin, hook: str, act: Callable[..., Any], *arguments: Any, time_s: float | None = None
    ) -> Job:
        job = Job(plugin, hook, act, arguments)
        try:
            thread = self._free()
        except ControlError:  # no thread can be started: rather here than not at all, as a detach must come to its end
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
        """Whether a hook of a plugin has not returned to this day."""
        return any(job.plugin is plugin and not job.is_over.is_set() for _, job in self._left)

    def residue(self) -> list[str]:
        """Say what goes on when the agent leaves."""
        found = []
        for thread, job in self._left:
            if not job.is_over.is_set():
                at = line_of(thread.thread.ident, job.plugin)
                found.append(f"a thread in the hook {job.hook} of the plugin {job.plugin.name}, at {at}")
        return found

    def halt(self) -> None:
        """Have the threads end that have nothing to do, without waiting for it."""
        while self._idle:
            with contextlib.suppress(IndexError):  # somebody else has taken it
                self._idle.pop().jobs.put(None)

    def close(self) -> None:
        """End the threads that have nothing to do."""
        while self._idle:
            thread = self._idle.pop()
            thread.jobs.put(None)
            thread.thread.join(TIME_S)


class _Outside:
    """Stands for the state of a thread that calls no modules."""

    busy = False


class PluginTicks:
    """Calls the hook `tick`."""

    def __init__(self, *, registry: Registry, telling: Telling, accounts: Accounts, cold: Cold) -> None:
        self._registry, self._tell, self._accounts, self._cold = registry, telling.tell, accounts, cold

    def tick(self, now_s: float) -> None:
        """Call all that are switched on, as pluggy would order them."""
        for one in self._registry.ordered("tick"):
            entry = self._registry.get(one.plugin)
            if entry is not None and one.is_on:
                self._cold.run(
                    entry, "tick", self._tell, _Outside(), [one], {"now_s": now_s}, self._accounts.is_metered
                )
