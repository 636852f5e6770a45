"""Convert the fleet to Prometheus families, from scratch at every scrape, so that no stale series remains."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.process_collector import ProcessCollector

from hookd.tool.daemon.fleet.targets import STATES
from hookd.tool.daemon.incidents.kinds import FROM_ZERO, Kinds
from hookd.tool.daemon.metrics.families import SUFFIXES, Heads, OwnPart, PageFamily, Part, cumulative, empty
from hookd.tool.daemon.metrics.replicas import Replicas
from hookd.tool.daemon.metrics.selection import FINDINGS, MAX_PER_USER, OF_STEPS, Limits, Selection, left_out
from hookd.tool.daemon.watch.watcher import Declared
from hookd.version import __version__
from hookd.wire.text import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized

    from hookd.tool.daemon.fleet.fleet import Fleet
    from hookd.tool.daemon.fleet.targets import Target
    from hookd.tool.daemon.watch.watcher import Watcher
    from hookd.wire.page import Family, Snapshot

_log = logging.getLogger(__name__)
PAUSE_BUCKETS_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1, 1.0)
PREFIX = "hookd_"
_STANDARD_LABELS = ("run", "rank")
_INFO_LABELS = (
    "pid", "local_rank", "world_size", "script", "method", "user", "python", "torch", "agent_version", "reason",
    "target_pod", "target_namespace", "target_container",
)  # fmt: skip

_BUILD = Declared("hookd_build", "info", "The version of this daemon.", ("version",))
_SCRAPE = Declared("hookd_scrape_duration_seconds", "gauge", "How long the scrape before this one took to collect.")
_ATTACHES = Declared("hookd_attach", "counter", "Attaches by their result.", ("result",))
_PAUSES = Declared("hookd_attach_pause_seconds", "histogram", "How long an attach stopped the target's main thread.")
_BACKING_OFF = Declared(
    "hookd_attach_backing_off",
    "gauge",
    "Processes that a rule wants and in which attach has failed; it is tried again, each time after a longer wait.",
)
_UP = Declared("hookd_target_up", "gauge", "1 while the target is attached and its page can be read, else 0.")
_INFO = Declared("hookd_target_info", "gauge", "Which process this is, and how it ended. Always 1.", _INFO_LABELS)
_STATE = Declared("hookd_target_state", "gauge", "1 for the state that the target is in.", ("state",))
_HEARTBEAT = Declared(
    "hookd_heartbeat_timestamp_seconds", "gauge", "When the target last called a module or stepped, in Unix time."
)
_CPU = Declared("hookd_target_cpu_seconds", "counter", "CPU time of the target.")
_MEMORY = Declared("hookd_target_resident_memory_bytes", "gauge", "Resident memory of the target.")
_THREADS = Declared("hookd_target_threads", "gauge", "Threads of the target.")
_FDS = Declared("hookd_target_open_fds", "gauge", "Open file descriptors of the target.")
_INCIDENTS = Declared("hookd_incidents", "counter", "Incidents, by kind.", ("kind",))
_LOST = Declared(
    "hookd_incidents_dropped",
    "counter",
    "Incidents that were not stored, because their target, run or user had too many.",
)
_ERRORS = Declared("hookd_target_errors", "counter", "Scrapes in which an error left out series of this target.")
_DROPPED = Declared(
    "hookd_series_dropped", "counter", "Series that are not served: over the limit, without room, or in conflict."
)
_FAMILIES = (
    _BUILD, _SCRAPE, _ATTACHES, _PAUSES, _BACKING_OFF, _UP, _INFO, _STATE, _HEARTBEAT, _CPU, _MEMORY, _THREADS, _FDS,
    _INCIDENTS, _LOST, _ERRORS, _DROPPED,
)  # fmt: skip
"""All families of the daemon itself. Neither a page nor a plugin may use their names: see `_Merged`."""


class AttachCounter:
    """Counts the attaches of this daemon; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._results = {"ok": 0}
        self._pauses = [0] * (len(PAUSE_BUCKETS_S) + 1)
        self._pause_sum_s = 0.0

    def count(self, result: str, pause_s: float | None = None) -> None:
        """Count one attach.

        Args:
            result: "ok", or the reason of the failure.
            pause_s: how long the target's main thread was stopped, in seconds.
        """
        with self._lock:
            self._results[result] = self._results.get(result, 0) + 1
            if pause_s is not None:
                bucket = next((n for n, bound in enumerate(PAUSE_BUCKETS_S) if pause_s <= bound), len(PAUSE_BUCKETS_S))
                self._pauses[bucket] += 1
                self._pause_sum_s += pause_s

    def sums(self) -> tuple[int, int]:
        """Return the number of successful attaches, and of failed ones."""
        with self._lock:
            return self._results["ok"], sum(self._results.values()) - self._results["ok"]

    def families(self) -> Iterator[Metric]:
        """Yield hookd_attach_total and hookd_attach_pause_seconds."""
        attaches = CounterMetricFamily(_ATTACHES.name, _ATTACHES.help, labels=_ATTACHES.labels)
        pauses = HistogramMetricFamily(_PAUSES.name, _PAUSES.help)
        with self._lock:
            for result, count in self._results.items():
                attaches.add_metric([result], count)
            pauses.add_metric([], cumulative(PAUSE_BUCKETS_S, self._pauses), self._pause_sum_s)
        yield attaches
        yield pauses


class FleetCollector:
    """A prometheus_client collector over a fleet, which runs one `collect` at a time.

    Args:
        backing_off: returns the processes in which an attach by rule has failed.
        is_fleet: whether other daemons serve the other ranks of a job, see `Replicas`.
        more: returns the families of plugins; its argument says whether a family's name, with its kind, is free.
    """

    def __init__(
        self,
        fleet: Fleet,
        attach_counter: AttachCounter,
        limits: Limits,
        backing_off: Callable[[], Sized] = tuple,
        *,
        clock: Callable[[], float] = time.monotonic,
        watchers: Sequence[Watcher] = (),
        kinds: Kinds | None = None,
        is_fleet: bool = False,
        more: Callable[[Callable[[str, str], bool]], Iterable[Metric]] = lambda _: (),
    ) -> None:
        self._fleet = fleet
        self._watchers = watchers
        self._kinds = kinds or Kinds()
        self._more = more
        self._backing_off = backing_off
        self._attach_counter = attach_counter
        self._limits = limits
        self._replicas = Replicas(is_fleet=is_fleet)
        self._clock = clock
        self._lock = threading.Lock()
        self._series: dict[Target, TargetSeries] = {}
        self._errors: Counter[Target] = Counter()
        self._last_scrape_s = 0.0
        self._process = ProcessCollector(registry=None)

    def collect(self) -> Iterator[Metric]:
        """Yield every family of every target, as a `Metric` of prometheus_client."""
        for family in self.families():
            yield family.metric() if isinstance(family, PageFamily) else family

    def families(self) -> list[Metric | PageFamily]:
        """Return every family of every target; those of the same name are merged."""
        with self._lock:
            started = self._clock()
            targets = self._fleet.targets()
            self._series = {target: self._series_of(target) for target in targets}
            merged = _Merged(family for watcher in self._watchers for family in watcher.families)
            replicas = set() if self._limits.replicas else self._replicas.among(targets)
            of_user = Counter(target.identity.uid for target in targets)
            for target, series in self._series.items():
                try:
                    most = MAX_PER_USER // of_user[target.identity.uid]
                    series.add_to(merged, started, most, is_replica=target in replicas)
                    for watcher in self._watchers:
                        series.add_samples(merged, watcher)
                except Exception:  # noqa: BLE001  an error in one target must not affect the others
                    self._failed(target)
                merged.add(_ERRORS, series.standard, self._errors[target])
            self._errors = Counter({target: self._errors[target] for target in targets})
            own = list(self._own_families())
            self._last_scrape_s = self._clock() - started
        of_pages = [family for family in merged.of_pages.values() if family.parts]
        return [*own, *merged.own.values(), *of_pages, *self._more(merged.is_free)]

    def facts(self) -> dict[str, float | None]:
        """Return facts for people: the seconds of the last scrape, and the numbers of attaches done and refused."""
        attached, refused = self._attach_counter.sums()
        return {"scrape_s": self._last_scrape_s or None, "attached": attached, "refused": refused}

    def _failed(self, target: Target) -> None:
        self._errors[target] += 1
        if self._errors[target] == 1:
            _log.exception("process %d is not served, or only in part, because of an error in hookd", target.pid)

    def _series_of(self, target: Target) -> TargetSeries:
        known = self._series.get(target)
        if known is not None and known.claim is target.claim:
            return known
        return TargetSeries(target, self._limits, self._kinds)

    def _own_families(self) -> Iterator[Metric]:
        yield InfoMetricFamily(_BUILD.name, _BUILD.help, value={"version": __version__})
        yield GaugeMetricFamily(_SCRAPE.name, _SCRAPE.help, self._last_scrape_s)
        yield from self._attach_counter.families()
        yield GaugeMetricFamily(_BACKING_OFF.name, _BACKING_OFF.help, len(self._backing_off()))
        yield from self._process.collect()


class _Merged:
    """The families of one scrape, by name.

    If targets disagree on the family of a name, the first one wins.

    Attributes:
        own: the daemon's families about its targets.
        incidents: the family of incidents, which the pages and the daemon both add to.
        of_pages: the pages' families.
    """

    def __init__(self, watched: Iterable[Declared]) -> None:
        self.own: dict[str, Metric] = {}
        self.incidents = PageFamily(_INCIDENTS.name, _INCIDENTS.help, _INCIDENTS.kind)
        self.of_pages = {_INCIDENTS.name: self.incidents}
        reserved = [name for family in (*_FAMILIES, *watched) for name in _names(family.name, family.kind)]
        # By name of a family or sample, the family that owns it; "" is the daemon.
        self._owners = dict.fromkeys(reserved, "")

    def add(self, family: Declared, labels: Mapping[str, str], value: float) -> None:
        """Add a sample to a gauge or counter of the daemon."""
        if family.name not in self.own:
            self.own[family.name] = empty(family.name, family.help, family.kind)
        (suffix,) = SUFFIXES[family.kind]
        self.own[family.name].add_sample(family.name + suffix, dict(labels), float(value))

    def is_free(self, name: str, kind: str) -> bool:
        """Whether neither the daemon nor a page has a family or sample with one of these names."""
        return not any(used in self._owners for used in _names(name, kind))

    def of_page(self, family: Family) -> PageFamily | None:
        """Return the family to which a page's is added; None if its name or labels collide with others."""
        if set(_STANDARD_LABELS) & set(family.labels) or not family.name.startswith(PREFIX):
            return None
        names = _names(family.name, family.kind)
        if any(self._owners.get(name, family.name) != family.name for name in names):
            return None
        self._owners.update(dict.fromkeys(names, family.name))
        known = self.of_pages.get(family.name)
        if known is None:
            known = self.of_pages[family.name] = PageFamily(family.name, family.help, family.kind)
        return known if known.kind == family.kind else None


class TargetSeries:
    """The series of one target under one claim, with the state that is kept between scrapes."""

    def __init__(self, target: Target, limits: Limits, kinds: Kinds) -> None:
        self._target = target
        self._kinds = kinds
        self._selection = Selection(limits)
        self._heads: dict[tuple[int, int, int], dict[int, Heads]] = {}
        self.claim = target.claim
        self.standard = {"run": self.claim.run, "rank": self.claim.rank}
        self._refused = 0
        self._warned_of = 0

    def add_to(self, merged: _Merged, now: float, most: int, *, is_replica: bool = False) -> None:
        """Add all families of this target, with at most `most` lines of its page; of a replica without its modules."""
        target = self._target
        snapshot = target.read()
        self._add_state(merged)
        self._add_process(merged, is_alive=target.ended is None)
        if snapshot is None or target.state == "corrupt":
            return
        before, self._heads = self._heads, {}  # retired series go with their key, see `page.Family`
        refused = 0
        counts: dict[str, float] = {}
        for family, indexes in self._selection.served(snapshot, now, most, is_replica=is_replica):
            if family.name == _DROPPED.name or not (
                family.kind in ("counter", "histogram") or self._is_current(family)
            ):
                continue
            if family.name == _INCIDENTS.name:
                self._count_incidents(counts, family)
                continue
            heads = self._heads[family.key] = before.get(family.key, {})
            if (into := merged.of_page(family)) is not None:
                into.parts.append(Part(family, indexes, self.standard, heads))
            else:
                refused += len(indexes)
        self._refused = max(self._refused, refused)
        counts = {**dict.fromkeys(FROM_ZERO, 0.0), **counts, **target.reported}
        samples = [({**self.standard, "kind": kind}, float(n)) for kind, n in sorted(counts.items())]
        merged.incidents.parts.append(OwnPart(_INCIDENTS.name + "_total", samples))
        merged.add(_LOST, self.standard, target.incidents_dropped)
        self._add_dropped(merged, snapshot)
        self._log_dropped()

    def _is_current(self, family: Family) -> bool:
        """Whether a gauge still holds: not after the end, and in a hang only if it does not describe the last steps."""
        is_hanging = self._target.hang is not None
        is_of_steps = family.name.startswith(OF_STEPS) and family.name not in FINDINGS
        return self._target.ended is None and not (is_hanging and is_of_steps)

    def add_samples(self, merged: _Merged, watcher: Watcher) -> None:
        """Add the samples of a watcher for this target."""
        for family, extra, value in watcher.samples(self._target):
            merged.add(family, {**self.standard, **extra}, value)

    def _count_incidents(self, counts: dict[str, float], family: Family) -> None:
        """Add a page's counts of incidents; `Kinds` bounds the number of different kinds."""
        if family.labels != ("kind",) or family.kind != "counter":
            return
        target, kinds = self._target, self._kinds
        process = (target.pid, target.start_ticks, target.page[1])
        for (kind,), first in zip(family.values, family.first, strict=True):
            if 0 <= (value := family.cells[first]) < math.inf:
                name = kinds.bounded(target.identity.uid, process, kind)
                counts[name] = counts.get(name, 0.0) + value

    def _log_dropped(self) -> None:
        """Log that series are left out, because a person who misses a series looks at the log next."""
        # Once per doubling: the modules of a model appear one after another.
        if self._selection.dropped > 2 * self._warned_of:
            self._warned_of = self._selection.dropped
            _log.warning(
                "process %d (run %s): %s", self._target.pid, one_line(self.claim.run), left_out(self._warned_of)
            )

    def _add_state(self, merged: _Merged) -> None:
        target, identity = self._target, self._target.identity
        merged.add(_UP, self.standard, target.ended is None)
        values = (
            target.pid, identity.local_rank, identity.world_size, identity.script, identity.method, identity.user,
            identity.python, identity.torch, identity.agent_version, target.ended.reason if target.ended else "",
            target.container.pod, target.container.namespace, target.container.container,
        )  # fmt: skip
        info = {**self.standard, **{label: str(value) for label, value in zip(_INFO_LABELS, values, strict=True)}}
        merged.add(_INFO, info, 1.0)
        for state in STATES:
            merged.add(_STATE, {**self.standard, "state": state}, state == target.state)
        if (heartbeat := target.heartbeat_time()) is not None:
            merged.add(_HEARTBEAT, self.standard, heartbeat)

    def _add_process(self, merged: _Merged, *, is_alive: bool) -> None:
        usage = self._target.usage()
        values = (
            (_CPU, usage.cpu_s, True),
            (_MEMORY, usage.rss_bytes, is_alive),
            (_THREADS, usage.threads, is_alive),
            (_FDS, usage.fds, is_alive),
        )
        for family, value, is_served in values:
            if value is not None and is_served:
                merged.add(family, self.standard, value)

    def _add_dropped(self, merged: _Merged, snapshot: Snapshot) -> None:
        dropped = next((family for family in snapshot.families if family.name == _DROPPED.name and family.first), None)
        by_agent = max(float(snapshot.dropped), dropped.cells[dropped.first[0]] if dropped is not None else 0.0)
        if math.isfinite(by_agent):
            value = by_agent + self._selection.dropped + self._refused
            merged.add(_DROPPED, self.standard, value)


def _names(name: str, kind: str) -> list[str]:
    """Return the name of a family and the names of its samples."""
    return [name, *(name + suffix for suffix in SUFFIXES[kind])]
