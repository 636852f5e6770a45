"""Changes of mutators, each carried out at the boundary of one optimizer step.

The control thread prepares a change (the plugin is loaded, checked and ready, and does nothing yet), and then arms it. The
training thread carries it out at the beginning of the next optimizer step: it only sets switches, and the plugin acts from
that step on. In a job of several ranks all ranks agree on the boundary, see `hookd.wire.agreement`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookd.errors import ControlError
from hookd.target.boot.identity import distributed, ranks
from hookd.target.events.liveness import collectives_of
from hookd.target.plugins.faults import Failure
from hookd.wire.agreement import boundary_ahead
from hookd.wire.originals import clock

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hookd.target.boot.arming import Life
    from hookd.target.boot.identity import Process
    from hookd.target.events.step_count import StepCount
    from hookd.target.plugins.core_metrics import CoreMetrics
    from hookd.target.plugins.incidents import Incidents
    from hookd.target.plugins.listeners import Loaded, Registry
    from hookd.target.plugins.loading import Loading
    from hookd.target.plugins.stopper import PluginStopper
    from hookd.target.remote.marks import Marks
    from hookd.wire.agent import Caller, ChangeStatus, Progress
    from hookd.wire.agreement import Agreement
    from hookd.wire.page import PageWriter

LEAVE_AHEAD_S = 1.0
"""How far ahead, in seconds, is the boundary at which all ranks stop a plugin because one rank detaches."""


class Change:
    """One change, from its preparation to its end.

    Attributes:
        kind: load, configure or unload.
        old: the plugin to be removed, or None.
        new: the plugin to be added, or None.
        by: the user who asked for it: `{"uid", "pid"}`, as reported by the kernel.
        mark: the agreed boundary; None: the next one.
        agreement: the agreement among several ranks.
        state: prepared, armed, done, aborted.
        tokens: a list with one item; of the training threads that reach the boundary together, the one that pops it carries
            out the change (a list's pop is atomic).
        at: the mark at which it was carried out; `step` is that step in words.
    """

    def __init__(self, kind: str, old: Loaded | None, new: Loaded | None, by: Caller) -> None:
        self.kind = kind
        self.old = old
        self.new = new
        self.by = by
        self.mark: int | None = None
        self.agreement: Agreement | None = None
        self.state = "prepared"
        self.tokens = [True]
        self.at: int | None = None
        self.step: str = ""

    @property
    def name(self) -> str:
        """The plugin's name."""
        loaded = self.new or self.old
        return loaded.name if loaded is not None else ""


class Changes:
    """The change in progress, if any, and the agreements of the ranks.

    Attributes:
        current: the last requested change; only the training thread moves it from armed to done or aborted.
    """

    def __init__(  # noqa: PLR0913
        self,
        *,
        process: Process,
        page: PageWriter,
        life: Life,
        count: StepCount,
        marks: Marks,
        registry: Registry,
        loading: Loading,
        stopper: PluginStopper,
        core: CoreMetrics,
        incidents: Incidents,
        own_failure: Callable[[str, BaseException], None],
    ) -> None:
        self._process, self._page, self._life, self._count, self._marks = process, page, life, count, marks
        self._registry, self._loading, self._stopper = registry, loading, stopper
        self._core, self._incidents, self._own_failure = core, incidents, own_failure
        self.current: Change | None = None
        self._is_leaving = False
        self._settled: Change | None = None
        self._loaded: list[Change] = []

    # -- in the control thread

    def prepare(self, kind: str, old: Loaded | None, new: Loaded | None, by: Caller) -> Change:
        """Register a change that is ready, and return it."""
        self.current = Change(kind, old, new, by)
        return self.current

    def loaded(self, loaded: Loaded, by: Caller) -> None:
        """Record a plugin loaded with the agent; it is reported at the first step, when the step's number is known."""
        self._loaded.append(Change("load", None, loaded, by))

    def require_idle(self) -> None:
        """Raise if another change is in progress.

        Raises:
            ControlError: reason "busy".
        """
        self.settle()
        if self.current is not None and self.current.state in ("prepared", "armed"):
            raise ControlError(
                f"{self.current.name} is being changed right now", reason="busy", hint="Try again when that is done."
            )

    def arm(self, mark: int | None, agreement: Agreement | None) -> None:
        """Arm the prepared change for the boundary `mark`; None: for the next one.

        Raises:
            ControlError: no change is prepared, or reason "passed": this rank has passed the boundary.
        """
        change = self.current
        if change is None or change.state != "prepared":
            raise ControlError("no change is prepared", reason="no-change")
        if mark is not None and self._marks.has_passed(mark):
            raise ControlError(f"this rank is past boundary {mark}", reason="passed")
        change.mark, change.agreement = mark, agreement
        change.state = "armed"
        # The training thread may have passed the boundary since the check above, without seeing the change.
        if mark is not None and self._marks.has_passed(mark) and change.state == "armed":
            change.state = "aborted"
            raise ControlError(f"this rank is past boundary {mark}", reason="passed")

    def is_due(self, plugin: str) -> bool:
        """Whether a plugin is to be changed or stopped at a boundary that the training has not reached yet."""
        change = self.current
        is_armed = change is not None and change.state == "armed" and change.name == plugin
        return is_armed or self._is_leaving

    def abandon(self) -> None:
        """Abort a change that is not decided yet, without any effect."""
        change = self.current
        if change is None or change.state not in ("prepared", "armed"):
            return
        if change.state == "armed" and (change.agreement is None or change.agreement.decide(commit=False)):
            return  # in a job of one rank, or committed already: it takes place
        change.state = "aborted"
        self.settle()

    def settle(self) -> None:
        """Clean up after a finished change: discard the old plugin, or after an abort the new one."""
        change = self.current
        if change is None or change is self._settled or change.state in ("prepared", "armed"):
            return
        self._settled = change
        goes, stays = (change.old, change.new) if change.state == "done" else (change.new, change.old)
        if goes is not None:
            self._loading.discard(goes, heir=stays)

    def describe(self) -> Progress:
        """Return the state of the change and the boundaries that this rank has passed, for `status`."""
        change, (marks, span_s) = self.current, self._marks.all()
        described: ChangeStatus | None = None
        if change is not None:
            described = {
                "name": change.name, "kind": change.kind, "state": change.state, "at": change.at, "step": change.step,
            }  # fmt: skip
        return {"change": described, "marks": marks, "span_s": span_s}

    # -- in the training thread

    def boundary(self) -> None:
        """Record the boundary at which an optimizer step begins, and carry out changes; called before any plugin's hook."""
        try:
            before = self._marks.last()
            mark = self._note() if self._process.world_size > 1 else 0
            while self._loaded:
                self._report(self._loaded.pop())
            change = self.current
            if change is not None and change.state == "armed" and (change.mark is None or mark >= change.mark):
                self._carry_out(change, mark)
            for loaded in self._registry.agreed:
                self._check(loaded, before, mark)
            if self._registry.alone:
                self.require_alone()
        except Failure as failure:
            self._own_failure("a change at a step's boundary", failure)

    def _note(self) -> int:
        mark = _collectives()
        self._marks.note(mark)
        return mark

    def _carry_out(self, change: Change, mark: int) -> None:
        try:
            change.tokens.pop()
        except IndexError:
            return
        if change.agreement is not None and not change.agreement.decide(commit=False):
            change.state = "aborted"
            return
        if change.new is not None:
            change.new.agreement = change.agreement
        self._loading.switch(change.old, change.new)
        change.at = mark
        self._report(change)
        change.state = "done"

    def _check(self, loaded: Loaded, before: int, mark: int) -> None:
        """Stop a plugin that has stopped on another rank."""
        agreement = loaded.agreement
        end = agreement.ended() if agreement is not None and loaded.state == "active" else None
        if end is None or mark < end[0]:
            return
        at, rank = end
        if rank == self._process.rank:
            why = "this rank leaves"
        elif before >= at:
            why = (f"it ended on rank {rank} before boundary {at}, which this rank had passed with it: since then the "
                   "weights of the ranks may differ")  # fmt: skip
        else:
            why = f"it ended on rank {rank}, and on this rank before the same step"
        self._stop(loaded, why, {"mark": mark, "ended_at": at, "by_rank": rank, "differs": before >= at})

    def require_alone(self) -> None:
        """Stop plugins that were started in a job of one rank, if it now has several."""
        _, world_size = ranks() or (0, 1)
        for loaded in self._registry.alone if world_size > 1 else ():
            why = f"this has become a job of {world_size} ranks, which have not agreed on it"
            self._stop(loaded, why, {})

    def _stop(self, loaded: Loaded, why: str, fields: Mapping[str, object]) -> None:
        self._stopper.switch_off(loaded, "disabled")
        self._registry.note_changing()
        self._core.show(loaded)
        message = f"{loaded.name} no longer changes the training from {self._count.origin()} on: {why}"
        self._incidents.report(loaded.name, "training_changed", message, {"change": "end", **fields})

    # -- the end

    def close(self) -> None:
        """Close the agreements once nothing uses them any more."""
        for loaded in self._registry:
            if loaded.agreement is not None:
                loaded.agreement.close()

    def leave(self, timeout_s: float) -> None:
        """Stop agreed plugins before a detach: on all ranks at one boundary ahead; wait until this rank has reached it."""
        self.abandon()
        agreed = [loaded for loaded in self._registry.agreed if loaded.state == "active"]
        if not agreed or not self._life.is_live:
            return
        self._is_leaving = True
        marks, span_s = self._marks.all()
        is_counting = len(set(marks)) > 1
        at = boundary_ahead([(marks, span_s)], LEAVE_AHEAD_S) if is_counting else marks[-1] + 1
        for loaded in agreed:
            if loaded.agreement is not None:
                loaded.agreement.end(self._process.rank, at)
        deadline = clock.monotonic() + timeout_s
        while any(loaded.state == "active" for loaded in agreed) and clock.monotonic() < deadline:
            clock.sleep(0.005)
        for loaded in agreed:
            if loaded.state == "active":
                self._page.log("error", f"{loaded.name}: no step has come within {timeout_s:g} s, so it ends here"
                               " before the boundary that was agreed on")  # fmt: skip

    def _report(self, change: Change) -> None:
        """Report an incident: what changes the training from this step on, who asked for it, and the options."""
        new = change.new
        change.step = self._count.origin()
        if new is not None and new.plugin.mutates:
            what = f"changes the training with {_options(new)}{_taken_back(change.old, new)}"
        elif change.old is not None and change.old.plugin.mutates:
            what = "no longer changes the training"
        else:
            return  # it only observes, before and after
        message = f"{change.name} {what}, from {change.step} on; asked for by user {change.by.get('uid')}"
        options = dict(new.context.options) if new is not None else {}
        fields = {"change": change.kind, "by": change.by, "mark": change.at, "options": options}
        self._incidents.report(change.name, "training_changed", message, fields)


def _options(loaded: Loaded) -> str:
    return ", ".join(f"{key}={value}" for key, value in loaded.context.options.items()) or "its defaults"


def _taken_back(old: Loaded | None, new: Loaded) -> str:
    gone = [name for name in old.context.options if name not in new.context.options] if old is not None else []
    return f" (no longer with {', '.join(gone)})" if gone else ""


def _collectives() -> int:
    """Return the number of collectives that the default process group has begun; 0 if torch does not count them."""
    used = distributed()
    return 0 if used is None else collectives_of(used.distributed_c10d._get_default_group()) or 0
