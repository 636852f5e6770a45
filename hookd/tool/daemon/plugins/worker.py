"""Run one daemon plugin in its own thread, where it may block or fail without affecting anything else."""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
import traceback
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hookd.errors import HookdError, worded
from hookd.serving.hookspecs import TIMES_S
from hookd.wire.plugin_frames import author_line, line_of
from hookd.wire.probation import Probation
from hookd.wire.text import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hookd.serving import DaemonPlugin
    from hookd.tool.daemon.plugins.discovery import AvailablePlugin, Hooks
    from hookd.tool.daemon.plugins.rows import DaemonPluginRow
    from hookd.wire.hook_error import HookError

MAX_ERRORS = 10
MAX_LAST_ERRORS = 20
"""Number of last errors that are kept with their text."""
BACK_OFF_S, LONGEST_BACK_OFF_S = 60.0, 3600.0
MAX_WAITING = 100
"""Maximum number of calls that wait for a plugin; further calls are skipped."""
_IMPORT_LOCK = threading.Lock()
"""Held during the import of a plugin, until its timeout: concurrent imports of libraries that import each other fail."""
STATES = ("starting", "active", "quarantined", "refused")
_log = logging.getLogger(__name__)


@dataclass
class Job:
    """A hook to call once for each of `rounds`; `done` is set at the end, whether the calls succeeded or not.

    `then` gets the return values of all rounds, unless a round has failed or timed out.
    """

    hook: str
    rounds: Sequence[Mapping[str, object]]
    then: Callable[[list[object]], None] | None = None
    done: threading.Event = field(default_factory=threading.Event)


class PluginWorker:
    """A daemon plugin with its thread, which imports the plugin and calls its hooks.

    Any thread may request calls. Only `call` and `close` wait for the plugin's code.

    Attributes:
        state: one of STATES.
        every_s: seconds between two calls of `collect`.
        hooks: the hooks that it implements; empty until it is imported.
        errors: number of errors, by hook.
        skipped: number of calls that were not made, because the plugin was quarantined or too many calls waited.
        troubles: the last errors.
    """

    def __init__(
        self, available: AvailablePlugin, options: Mapping[str, str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.available = available
        self.hooks: Hooks = {}
        self.state = "starting"
        self.every_s = 0.0
        self.last_errors: deque[HookError] = deque(maxlen=MAX_LAST_ERRORS)
        self.errors: Counter[str] = Counter()
        self.seconds = 0.0
        self.skipped = 0
        self._clock = clock
        self._probation = Probation(BACK_OFF_S, LONGEST_BACK_OFF_S)
        self._since = 0  # errors since the plugin was last admitted
        self._lock = threading.Lock()
        self._waiting: queue.Queue[Job | None] = queue.Queue(MAX_WAITING)
        self._under_way: tuple[Job, float] | None = None
        self._late: Job | None = None
        self._periodic: dict[str, tuple[Job | None, float]] = {}  # by hook, its last job and when it was requested
        self._has_import_lock = False
        # The module's name, until the plugin is created.
        self._plugin: object = available.source.entry.partition(":")[0]
        configure = Job("configure", [{"options": options}])
        # A daemon thread, because a plugin that never returns must not keep the process alive.
        self._thread = threading.Thread(
            target=self._run, args=(configure,), name=f"hookd-plugin-{available.name}", daemon=True
        )
        self._thread.start()

    @property
    def name(self) -> str:
        """The plugin's name."""
        return self.available.name

    @property
    def last_error(self) -> HookError:
        """The last error, empty if there was none."""
        return self.last_errors[-1] if self.last_errors else {}

    @property
    def is_idle(self) -> bool:
        """Whether the plugin does nothing, and no call waits for it."""
        return self.state != "starting" and self._waiting.unfinished_tasks == 0

    def ask(
        self, hook: str, rounds: Sequence[Mapping[str, object]], then: Callable[[list[object]], None] | None = None
    ) -> Job | None:
        """Request calls of a hook, see `Job`.

        Returns:
            The job; None if the plugin does not have the hook, is refused or quarantined, or too many calls wait.
        """
        if self.state == "refused" or (self.state != "starting" and hook not in self.hooks):
            return None
        job = Job(hook, rounds, then)
        if self.state != "quarantined":
            with contextlib.suppress(queue.Full):
                self._waiting.put_nowait(job)
                return job
        self.skipped += 1
        return None

    def ask_every(
        self, every_s: float, hook: str, rounds: Sequence[Mapping[str, object]], then: Callable[[list[object]], None]
    ) -> None:  # fmt: skip
        """Request a periodic hook, if it is due and its last call has returned."""
        now, (last, at) = self._clock(), self._periodic.get(hook, (None, -math.inf))
        if hook in self.hooks and now - at >= every_s and (last is None or last.done.is_set()):
            self._periodic[hook] = (self.ask(hook, rounds, then), now)

    def call(self, hook: str, **arguments: Any) -> None:
        """Call a hook and wait until it has returned; blocks for at most the hook's timeout."""
        job = self.ask(hook, [arguments])
        if job is not None and not job.done.wait(TIMES_S[hook]):
            self.poll()

    def poll(self) -> None:
        """Enforce the timeout of the current call, and readmit a quarantined plugin; called about once a second."""
        now, under_way = self._clock(), self._under_way
        if under_way is not None:
            job, began = under_way
            if now - began >= TIMES_S[job.hook] and self._late is not job:
                self._late = job
                self._time_out(job.hook, line_of(self._thread.ident, self._plugin))
            return
        with self._lock:
            if self.state == "quarantined" and self._probation.is_over(now):
                self.state, self._since = "active", 0
                self._probation.admit(now)
                _log.warning("plugin %s is active again, on probation", self.name)

    def _time_out(self, hook: str, where: str) -> None:
        limit = f"longer than {TIMES_S[hook]:g} s"
        if self.state == "starting":
            self._release_import_lock()
            self._refuse(f"its import and configure take {limit}", where)
        else:
            self._failed(hook, f"{hook} takes {limit}", where, is_timeout=True)

    def close(self) -> None:
        """Call `close` and end the thread; blocks for at most the timeout of `close`."""
        if self.state == "active":
            self.call("close")
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(0.1)

    def _run(self, configure: Job) -> None:
        self._start(configure)
        while (job := self._waiting.get()) is not None:
            began = self._clock()
            self._under_way = (job, began)
            try:
                if self.state == "active":
                    self._do(job)
            finally:
                self.seconds += self._clock() - began
                self._under_way = None
                job.done.set()
                self._waiting.task_done()

    def _start(self, job: Job) -> None:
        """Import and configure the plugin; one that fails or takes too long here is refused permanently.

        The timeout starts when the thread has the import lock.
        """
        try:
            plugin = self._load(job)
            if not plugin.readmit:
                self._probation = Probation(0.0, 0.0)
            if job.hook in self.hooks:
                function, names = self.hooks[job.hook]
                function(**{name: job.rounds[0][name] for name in names})
            self.every_s = float(plugin.every_s)
        except BaseException as error:  # noqa: BLE001  no exception of a plugin may stop the daemon
            text = error.message if isinstance(error, HookdError) else f"configure: {worded(error)}"
            where = author_line(error, self._plugin)
            # The traceback of hookd's own error contains only hookd's code, which does not help an author.
            shown = error if where or not isinstance(error, HookdError) else error.__cause__
            self._refuse(text, where, "".join(traceback.format_exception(shown)) if shown is not None else "")
        else:
            source = self.available.source
            if self.state == "starting":
                _log.info("plugin %s %s (sha256 %s) runs here", self.name, one_line(source.version), source.sha256)
                self.state = "active"
        finally:
            self._under_way = None

    def _load(self, job: Job) -> DaemonPlugin:
        _IMPORT_LOCK.acquire()
        self._has_import_lock = True
        self._under_way = (job, self._clock())
        try:
            self._plugin, self.hooks = plugin, _ = self.available.load()
            return plugin
        finally:
            self._release_import_lock()

    def _release_import_lock(self) -> None:
        """Release the import lock, if this plugin still holds it: after the import, or at its timeout."""
        with self._lock:
            had, self._has_import_lock = self._has_import_lock, False
        if had:
            _IMPORT_LOCK.release()

    def _refuse(self, text: str, where: str = "", trace: str = "") -> None:
        self.state = "refused"
        self._record("configure", text, where, trace)
        _log.error("plugin %s is refused: %s", self.name, one_line(text))

    def _record(self, hook: str, text: str, where: str, trace: str) -> None:
        self.errors[hook] += 1
        self.last_errors.append({"hook": hook, "text": text[:500], "where": where, "traceback": trace[-3000:]})

    def _do(self, job: Job) -> None:
        if job.hook not in self.hooks:
            return
        function, names = self.hooks[job.hook]
        try:
            results = [function(**{name: arguments[name] for name in names}) for arguments in job.rounds]
            if job.then is not None and job is not self._late:
                job.then(results)
        except BaseException as error:  # noqa: BLE001  no exception of a plugin may stop the daemon
            where, trace = author_line(error, self._plugin), "".join(traceback.format_exception(error))
            self._failed(job.hook, worded(error), where, trace)

    def _failed(self, hook: str, text: str, where: str, trace: str = "", *, is_timeout: bool = False) -> None:
        with self._lock:
            self._since += 1
            is_first = self.last_error.get("text") != text
            self._record(hook, text, where, trace)
            limit = 1 if is_timeout or self._probation.is_on(self._clock()) else MAX_ERRORS
            is_quarantined = self.state == "active" and self._since >= limit
            if is_quarantined:
                self.state = "quarantined"
                wait_s = self._probation.quarantine(self._clock())
        if is_first:
            at = f" at {where}" if where else ""
            _log.error("plugin %s: %s: %s%s", self.name, hook, one_line(text), one_line(at))
        if is_quarantined:
            until = f"for {wait_s:g} s" if wait_s else "until the daemon starts again"
            _log.error("plugin %s is quarantined %s after %d errors: %s", self.name, until, self._since, one_line(text))

    def row(self) -> DaemonPluginRow:
        """Return a description of the plugin, as JSON values."""
        return {
            **self.available.row(), "state": self.state, "hooks": sorted(self.hooks), "errors": sum(self.errors.values()),
            "seconds": self.seconds, "skipped": self.skipped, "error": self.last_error,
        }  # fmt: skip
