"""What a person reads out of a report: where a target stands, what a module costs, what is wrong with it.

Runs on both sides, stdlib only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hookd.wire.module_names import is_root

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_LINE = 100
SHOWN = ("seq", "time", "kind", "message", "module", "step", "plugin", "place", "count", "last")
"""Of an incident's detail what stands elsewhere; `place` is what the daemon knows a silence by, and nothing to read."""


def state(report: dict[str, Any]) -> str:
    """Give the state of a target: as who serves it sees it where that says more than the page, else the page's.

    While a thread of it waits for a person it is "paused", while it hangs "hangs".
    """
    seen = report.get("target", {}).get("state")
    if report.get("target", {}).get("hang"):
        return "hangs"
    is_paused = report["state"] == "running" and any(one["phase"] == "paused" for one in report["threads"])
    return str(seen if seen not in (None, "attached") else "paused" if is_paused else report["state"])


def paused(report: dict[str, Any]) -> str | None:
    """Say of a paused target why it is, and how it goes on, as the plugin has told it; None if it is not paused."""
    if state(report) != "paused":
        return None
    why: dict[str, Any] = next((one for one in reversed(report["incidents"]) if one.get("kind") == "paused"), {})
    return str(why.get("message", "a plugin has paused it")).replace(" PID ", f" {report['pid']} ")


def step_seconds(report: dict[str, Any]) -> float | None:
    """Give the mean time of a step, in seconds; None before the second one."""
    histogram = report["metrics"].get("step", {}).get("seconds")
    return histogram["mean"] if isinstance(histogram, dict) else None


def phases(found: dict[str, Any]) -> list[tuple[str, float]]:
    """Give the share of each phase in the time of a step."""
    rows = found["metrics"].get("timing", {}).get("phase_seconds", [])
    total = sum(row["value"] or 0 for row in rows)
    return [(row["phase"], (row["value"] or 0) / total) for row in rows] if total else []


def module_seconds(row: dict[str, Any]) -> float:
    """Give the seconds that a module's calls have taken, forward and backward."""
    timing = row["metrics"].get("timing", {})
    return float((timing.get("forward_seconds") or 0) + (timing.get("backward_seconds") or 0))


def whole_seconds(rows: Sequence[dict[str, Any]]) -> float:
    """Give the seconds of all outermost calls: what the share of a module is of."""
    return sum(module_seconds(row) for row in rows if is_root(row["name"]))


def finding(row: dict[str, Any]) -> str:
    """Say in a word or two what is wrong with a module."""
    found = row["metrics"].get("nan", {})
    born = [one for one in found.get("origin", []) if one["value"]]
    if born:
        what = "first" if born[0]["value"] == 1 else "perhaps the first"
        return f"{what} {_kind(born[0])} ({born[0]['where']})"
    seen = [one for one in found.get("nonfinite", []) if one["value"]]
    return ", ".join(f"{_kind(one)} ({one['where']}) {one['value']:.0f}x" for one in seen)


def looks_at(plugin: dict[str, Any]) -> str:
    """Say at how many steps a plugin looks."""
    every = plugin["interval_steps"]
    return "-" if not every else "every step" if every == 1 else f"one step in {every:.0f}"


def _kind(labels: dict[str, Any]) -> str:
    return {"nan": "NaN", "inf": "Inf"}.get(labels["kind"], str(labels["kind"]))


def short(value: object) -> str:
    """Write what has room in a line; nothing where it has not."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list) and not any(isinstance(part, (list, dict)) for part in value):
        told = ", ".join(map(str, value))
        return told if len(told) <= MAX_LINE else ""
    return "" if isinstance(value, (list, dict)) else str(value)


def is_called_only(step: dict[str, Any]) -> bool:
    """Whether a model was called and nothing trained, by `hookd.tool.reports.report.describe_steps`, perhaps another version's."""
    return bool(step.get("calls")) and not step.get("counted")


def counted(step: dict[str, Any]) -> tuple[str, int]:
    """Return what is counted, in a few words, and how many."""
    if is_called_only(step):
        return "calls of the model, no step", step["calls"]
    return "step" if step["is_absolute"] else "steps since the attach", step["current"]
