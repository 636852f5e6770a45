"""Build the report on a target from its page: one object that JSON can represent."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Any, Literal, cast

from hookd.tool.reports.collapse import collapse
from hookd.wire.module_names import names_above
from hookd.wire.page import STEP_RECORD

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hookd.wire.hook_error import HookError
    from hookd.wire.identity import Identity
    from hookd.wire.page import Family, Record, Snapshot
    from hookd.wire.report import ModuleRow, PluginRow, Report, Steps, ThreadRow

OWN = "hookd"
"""The label `plugin` of `hookd_overhead_seconds` for hookd itself."""
OUR_THREADS = ("hookd", "hookd-attach")
"""Threads of the agent. The report has them only if they have called a module."""
MAX_LOGS = 50
"""Number of lines of the agent's log in a report: the last ones."""
RECENT = 512
"""Number of records of which a report's last steps are: a sampled step has one for each call of a module."""
STEPS = 16
"""Number of last steps whose mean time a report has."""


def build_report(snapshot: Snapshot, pid: int, *, records: Iterable[Record] = (), has_modules: bool = True) -> Report:
    """Merge the families of a page by module, plugin and incident.

    A metric `hookd_<plugin>_<thing>` of a module is at `modules[n]["metrics"][plugin][thing]`: a number, a
    histogram `{"count", "sum", "mean"}`, or, if the family has labels besides `module`, a list of
    `{**labels, "value": …}`. A metric without a module is at `metrics[plugin][thing]` in the same form. Numbers
    that JSON does not have are None.

    Args:
        snapshot: of a page; may be the last one of a process that has exited.
        pid: of the target.
        records: the last ones of the page's recorder, for the time of the last steps; see `RECENT`.
        has_modules: whether to include a row for each module, which takes most of the time; else `modules` is empty.
    """
    values = _values(snapshot)
    if _single(values, "hookd_overhead_ratio") is None:  # no step was metered yet: a 0 is not a measurement
        _make_unknown(values.get("hookd_overhead_seconds", []))
    return {
        "pid": pid,
        "identity": snapshot.identity,
        "state": snapshot.state,
        "step": describe_steps(snapshot),
        "step_seconds": _step_seconds(records),
        "modules": module_rows(snapshot) if has_modules else [],
        "metrics": metrics(snapshot),
        "observed": {labels["state"]: value for labels, value in values.get("hookd_modules", []) if "state" in labels},
        "plugins": _plugins(values, snapshot),
        "overhead": {
            "ratio": _single(values, "hookd_overhead_ratio"),
            "seconds": _sum(values, "hookd_overhead_seconds"),
            "own_seconds": _own(values.get("hookd_overhead_seconds", [])),
        },
        "incidents": collapse(snapshot.incidents),
        "threads": thread_rows(snapshot),
        "logs": snapshot.logs[-MAX_LOGS:],
        "dropped_series": snapshot.dropped,
    }


def _step_seconds(records: Iterable[Record]) -> float | None:
    """Return the mean time of the last steps; None if no step was recorded."""
    times = [record.value for record in records if record.kind == STEP_RECORD and 0 < record.value < math.inf]
    return statistics.fmean(times[-STEPS:]) if times else None


def _make_unknown(series: list[tuple[dict[str, str], Any]]) -> None:
    series[:] = [(labels, value or None) for labels, value in series]


def describe_steps(snapshot: Snapshot) -> Steps:
    """Describe how many steps have been done, since the attach and in the whole run."""
    offset = snapshot.identity.get("step_offset")
    done, calls = _count(snapshot, "hookd_steps"), _count(snapshot, "hookd_step_calls")
    each = (_count(snapshot, "hookd_micro_batches") / done if done else 0) or None  # an older agent has no such counter
    if calls and not done:
        text = (
            f"{calls} call{'' if calls == 1 else 's'} of the model, no step: nothing has been trained since the attach"
        )
        return {
            "counted": 0, "offset": None, "current": 0, "is_absolute": False, "calls": calls, "micro_batches": each, "text": text
        }  # fmt: skip
    if not isinstance(offset, int) or isinstance(offset, bool):
        text = f"{_done(done)} since the attach{_of(each)}"
        return {
            "counted": done, "offset": None, "current": done, "is_absolute": False, "calls": calls, "micro_batches": each,
            "text": text,
        }  # fmt: skip
    current = done + offset
    return {
        "counted": done, "offset": offset, "current": current, "is_absolute": True, "calls": calls, "micro_batches": each,
        "text": f"{_done(current)}{_of(each)}",
    }  # fmt: skip


def _done(count: int) -> str:
    """Return the number of completed steps in words."""
    # "done", because an incident has the number of the step in progress, which is the next one.
    return f"{count} step{'' if count == 1 else 's'} done"


def _of(micro_batches: float | None) -> str:
    """Return the mean number of micro-batches of a step in words; "" without gradient accumulation."""
    number = round(micro_batches or 1)
    return f", {number} micro-batches each" if number > 1 else ""


def steps(snapshot: Snapshot) -> int:
    """Return how many training steps the agent has counted."""
    return _count(snapshot, "hookd_steps")


def _count(snapshot: Snapshot, counter: str) -> int:
    family = next((family for family in snapshot.families if family.name == counter), None)
    value = family.cells[family.first[0]] if family is not None and family.first else 0.0
    return int(value) if 0 <= value < 2**53 else 0


def module_rows(snapshot: Snapshot) -> list[ModuleRow]:
    """Return a row for each module, each below its parent; otherwise in the agent's order."""
    rows: dict[str, ModuleRow] = {
        entry.name: {"name": entry.name, "type": entry.type, "root": entry.root, "metrics": {}}
        for _, entry in sorted(snapshot.modules.items())
    }
    for family in snapshot.families:
        if "module" not in family.labels:
            continue
        plugin, thing = _split(family.name)
        for labels, value in _series(family):
            name = labels.pop("module")
            row = rows.setdefault(name, {"name": name, "type": "", "root": 0, "metrics": {}})
            _put(row["metrics"].setdefault(plugin, {}), thing, labels, value)
    return _in_tree_order(rows)


def _in_tree_order(rows: dict[str, ModuleRow]) -> list[ModuleRow]:
    """Put each module behind its nearest ancestor: one that was added to a model late comes last in the agent's order."""
    below: dict[str | None, list[str]] = {}
    for name in rows:
        below.setdefault(next((parent for parent in names_above(name) if parent in rows), None), []).append(name)
    ordered, todo = [], below.get(None, [])[::-1]
    while todo:
        ordered.append(rows[name := todo.pop()])
        todo += below.get(name, [])[::-1]
    return ordered


def metrics(snapshot: Snapshot) -> dict[str, dict[str, Any]]:
    """Return the metrics without a module, by plugin and thing."""
    by_plugin: dict[str, dict[str, Any]] = {}
    for family in snapshot.families:
        if "module" in family.labels:
            continue
        plugin, thing = _split(family.name)
        for labels, value in _series(family):
            _put(by_plugin.setdefault(plugin, {}), thing, labels, value)
    return by_plugin


def _put(things: dict[str, Any], thing: str, labels: dict[str, str], value: object) -> None:
    if labels:
        things.setdefault(thing, []).append({**labels, "value": value})
    else:
        things[thing] = value


def _split(name: str) -> tuple[str, str]:
    """Split `hookd_timing_forward_seconds` into plugin and thing.

    A family of the core has no plugin: `hookd_steps` is split into (steps, steps).
    """
    plugin, _, thing = name.removeprefix("hookd_").partition("_")
    return plugin, thing or plugin


def _series(family: Family) -> Iterator[tuple[dict[str, str], Any]]:
    for values, cells in family.series:
        labels = dict(zip(family.labels, values, strict=True))
        if family.kind == "histogram":
            count, total = sum(cells[:-1]), cells[-1]
            mean = _number(total / count) if count else None
            yield labels, {"count": _number(count), "sum": _number(total), "mean": mean}
        else:
            yield labels, _number(cells[0])


def _number(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < 2**53 else value


def _values(snapshot: Snapshot) -> dict[str, list[tuple[dict[str, str], Any]]]:
    return {family.name: list(_series(family)) for family in snapshot.families if "module" not in family.labels}


def plugin_options(identity: Identity, name: str, which: str = "options") -> dict[str, str]:
    """Return what the page says of a plugin.

    Args:
        identity: of the page.
        name: of the plugin.
        which: "options" that it was given, "settings" for all options in force, "source" that it was loaded from, or its
            last "error".
    """
    node: Any = identity
    for key in ("plugins", name, which):  # the page is the target's: anything may be missing or of another type
        node = node.get(key) if isinstance(node, dict) else None
    return {key: value for key, value in node.items() if isinstance(value, str)} if isinstance(node, dict) else {}


def _plugins(values: dict[str, list[tuple[dict[str, str], Any]]], snapshot: Snapshot) -> list[PluginRow]:
    """Return a row for each plugin; `changes_training` is None for an observer."""
    rows: dict[str, PluginRow] = {}
    identity = snapshot.identity

    def row(labels: dict[str, str]) -> PluginRow:
        name = labels.get("plugin", "")
        empty: PluginRow = {"name": name, "state": None, "changes_training": None, "errors": 0, "interval_steps": None,
                 "overhead_seconds": None, "options": plugin_options(identity, name),
                 "settings": plugin_options(identity, name, "settings"), "call_seconds": None, "series": 0, "refused_series": 0,
                 "source": plugin_options(identity, name, "source"),
                 "error": cast("HookError", plugin_options(identity, name, "error"))}  # fmt: skip
        return rows.setdefault(name, empty)

    for labels, value in values.get("hookd_plugin_state", []):
        if value:
            row(labels)["state"] = labels.get("state")
    columns: dict[Literal["errors", "interval_steps", "overhead_seconds", "call_seconds", "refused_series"], str] = {
        "errors": "hookd_plugin_errors",
        "interval_steps": "hookd_sampling_interval_steps",
        "overhead_seconds": "hookd_overhead_seconds",
        "call_seconds": "hookd_plugin_call_seconds",
        "refused_series": "hookd_plugin_series_refused",
    }
    for column, name in columns.items():
        for labels, value in values.get(name, []):
            if labels.get("plugin") != OWN:
                row(labels)[column] = value
    for labels, value in values.get("hookd_plugin_changes_training", []):
        row(labels)["changes_training"] = bool(value)
    for family in snapshot.families:
        if (owner := owner_of(family.name, rows)) is not None:
            rows[owner]["series"] += len(family.first)
    return sorted(rows.values(), key=lambda plugin: str(plugin["name"]))


def owner_of(family: str, plugins: Iterable[str]) -> str | None:
    """Return the plugin of a family: of several names that match, the longest."""
    return max((name for name in plugins if family.startswith(f"hookd_{name}_")), key=len, default=None)


def thread_rows(snapshot: Snapshot) -> list[ThreadRow]:
    """Return a row for each thread, as of when the page was copied."""
    return [
        {
            "tid": beat.tid,
            "name": beat.name,
            "phase": beat.phase,
            "module": snapshot.modules[beat.module].name if beat.module in snapshot.modules else None,
            "step": beat.step,
            "events": beat.events,
        }
        for beat in snapshot.heartbeats
        if beat.events or beat.name not in OUR_THREADS
    ]


def _single(values: dict[str, list[tuple[dict[str, str], Any]]], name: str) -> Any:
    return next((value for _, value in values.get(name, [])), None)


def _own(seconds: list[tuple[dict[str, str], Any]]) -> Any:
    """Return the seconds of hookd itself, without its plugins."""
    return next((value for labels, value in seconds if labels.get("plugin") == OWN), None)


def _sum(values: dict[str, list[tuple[dict[str, str], Any]]], name: str) -> float | None:
    """Return the sum of known values; None if there are only unknown ones."""
    series = values.get(name, [])
    known = [value for _, value in series if value is not None]
    return float(sum(known)) if known or not series else None
