"""Read from a report what is shown to a person: states, times and findings."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from hookd.tool.reports import wording
from hookd.wire.module_names import is_root

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hookd.wire.incident import Incident
    from hookd.wire.report import ModuleRow, PluginRow, Report, Steps
    from hookd.wire.target import TargetRow

MAX_LINE = 100
INFERENCE, COLLECTIVES = "inference", "collectives"
"""The phase that is not part of a step, and the one that a job of one rank does not have."""
WAITS = 0.5
"""A phase contains waiting for other ranks if more than this share of the steps issue collectives in it."""
SHOWN = ("seq", "time", "kind", "message", "module", "step", "plugin", "place", "count", "last")
"""Keys of an incident that are shown elsewhere, or never: `place` only identifies a hang to the daemon."""


MOST_RATES = 4
"""Number of learning rates that a report names."""


class _Phase(TypedDict):
    """A value of the metric `phase_seconds` of `timing`."""

    phase: str
    value: float | None


class _Loss(TypedDict):
    """A value of the metric `loss` of `activations`."""

    backward: str
    value: float | None


class _Nonfinite(TypedDict):
    """A value of the metric `origin` or `nonfinite` of `nan`."""

    where: str
    kind: str
    value: float


def state(report: Report, row: TargetRow | None = None) -> str:
    """Return the state of a target.

    That is the daemon's view of it if this says more than the page, else the page's.

    In a hang it is "hangs" for the ranks that others wait for and "waits" for those that wait. It is "paused" while one of its threads waits for a person.

    Args:
        report: of the target.
        row: the daemon's row; by default that of the report.
    """
    row = row or report.get("target")
    served_state = row["state"] if row is not None else None
    if row is not None and row["hang"]:
        return wording.hang_state(row["hang"])
    is_paused = report["state"] == "running" and any(thread["phase"] == "paused" for thread in report["threads"])
    return str(served_state if served_state not in (None, "attached") else "paused" if is_paused else report["state"])


def paused(report: Report, row: TargetRow | None = None) -> str | None:
    """Return a plugin's message on why a target is paused and how to resume it, or None; arguments as of `state`."""
    if state(report, row) != "paused":
        return None
    rows = [row for row in reversed(report["incidents"]) if row.get("kind") == "paused"]
    latest = max(rows, key=_last_time, default=None)
    message = None if latest is None else latest.get("message")
    return str(message or "a plugin has paused it").replace(" PID ", f" {report['pid']} ")


def _last_time(row: Incident) -> float:
    return row.get("last") or row.get("time") or 0.0  # equal incidents are one row, at the place of the first


def run_and_rank(report: Report) -> tuple[str, str]:
    """Return a target's labels: those that the daemon has given it, else those of its page."""
    labels = {**report["identity"], **report.get("target", {})}
    return str(labels.get("run")), str(labels.get("rank"))


def step_seconds(report: Report) -> float | None:
    """Return the mean time of the last steps in seconds, else that of all steps since the attach; None before the second step."""
    if seconds := report.get("step_seconds"):  # an older daemon does not send it
        return seconds
    histogram = report["metrics"].get("step", {}).get("seconds")
    return histogram["mean"] if isinstance(histogram, dict) else None


def phases(report: Report) -> list[tuple[str, float]]:
    """Return the share of each phase in step time, 0 to 1."""
    spent = of_a_step(_phase_seconds(report))
    total = sum(spent.values())
    return [(phase, seconds / total) for phase, seconds in spent.items()] if total else []


def of_a_step(spent: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of the phases that a step has: without inference, and without collectives in a job of one rank."""
    return {
        phase: seconds for phase, seconds in spent.items() if phase != INFERENCE and (seconds or phase != COLLECTIVES)
    }


def waiting_in(report: Report) -> list[str]:
    """Return the phases beside the backward in which ranks may wait for each other; see docs/ranks.md."""
    rows: list[_Phase] = report["metrics"].get("collectives", {}).get("phase_ratio", [])
    return [row["phase"] for row in rows if (row["value"] or 0.0) > WAITS and row["phase"] != "backward"]


def inference_share(report: Report) -> float:
    """Return the share of inference in the time of the training thread, 0 to 1; it is not part of a step."""
    spent = _phase_seconds(report)
    total = sum(spent.values())
    return spent.get(INFERENCE, 0.0) / total if total else 0.0


def _phase_seconds(report: Report) -> dict[str, float]:
    rows: list[_Phase] = report["metrics"].get("timing", {}).get("phase_seconds", [])
    return {row["phase"]: row["value"] or 0.0 for row in rows}


def module_seconds(row: ModuleRow) -> float:
    """Return the time of a module's calls in seconds: forward, backward and inference."""
    timing = row["metrics"].get("timing", {})
    return float(sum(timing.get(f"{kind}_seconds") or 0 for kind in ("forward", "backward", INFERENCE)))


def calls(row: ModuleRow) -> float:
    """Return the number of a module's calls, of the training and of inference."""
    timing = row["metrics"].get("timing", {})
    return float(sum(timing.get(f"{kind}_calls") or 0 for kind in ("forward", INFERENCE)))


def call_seconds(row: ModuleRow, direction: str) -> float | None:
    """Return the mean time of a module's calls, "forward", "backward" or "inference"; None if unknown."""
    timing = row["metrics"].get("timing", {})
    total, calls = timing.get(f"{direction}_seconds"), timing.get(f"{direction}_calls")
    return float(total / calls) if total is not None and calls else None


def model_seconds(rows: Sequence[ModuleRow]) -> float:
    """Return the time of all root modules in seconds, the base of a module's share."""
    return sum(module_seconds(row) for row in rows if is_root(row["name"]))


def notable(rows: Sequence[ModuleRow], limit: int) -> list[ModuleRow]:
    """Return the `limit` costliest modules and those with a finding, in the order of the model."""
    costliest = sorted(rows, key=module_seconds, reverse=True)[:limit]
    names = {row["name"] for row in costliest} | {row["name"] for row in rows if finding(row)}
    return [row for row in rows if row["name"] in names]


def finding(row: ModuleRow) -> str:
    """Return what is wrong with a module in a few words, or ""."""
    metrics = row["metrics"].get("nan", {})
    born: list[_Nonfinite] = metrics.get("origin", [])
    seen: list[_Nonfinite] = metrics.get("nonfinite", [])
    origins = [series for series in born if series["value"]]
    if origins:
        what = "first" if origins[0]["value"] == 1 else "perhaps the first"
        return f"{what} {_kind(origins[0])} ({origins[0]['where']})"
    nonfinite = [series for series in seen if series["value"]]
    return ", ".join(f"{_kind(series)} ({series['where']}) {series['value']:.0f}x" for series in nonfinite)


def looks_at(plugin: PluginRow) -> str:
    """Return in words how often a plugin samples a step, or "-"."""
    every = plugin["interval_steps"]
    return "-" if not every else "every step" if every == 1 else f"one step in {every:.0f}"


def _kind(place: _Nonfinite) -> str:
    return {"nan": "NaN", "inf": "Inf"}.get(str(place["kind"]), str(place["kind"]))


def short(value: object) -> str:
    """Return a value as text.

    The result is "" for nested values, and for lists longer than MAX_LINE characters.
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list) and not any(isinstance(part, (list, dict)) for part in value):
        text = ", ".join(map(str, value))
        return text if len(text) <= MAX_LINE else ""
    return "" if isinstance(value, (list, dict)) else str(value)


def loss(report: Report) -> float | None:
    """Return the loss of the first backward of the last step; None if no plugin publishes it."""
    rows: list[_Loss] = report["metrics"].get("activations", {}).get("loss", [])
    return next((row["value"] for row in rows if row["backward"] == "0"), None)


def backwards(report: Report) -> int:
    """Return the number of losses that a step has, as far as `activations` publishes them."""
    return len(report["metrics"].get("activations", {}).get("loss", []))


def learning(report: Report) -> list[str]:
    """Return the learning rates and the norm of all gradients in words, as of the last sampled step."""
    rates = [row["value"] for row in report["metrics"].get("learning", {}).get("rate", [])]
    norm = report["metrics"].get("activations", {}).get("total_grad_norm")
    shown = list(dict.fromkeys(wording.number(rate) for rate in rates[:MOST_RATES]))
    more = ", …" if len(rates) > MOST_RATES else ""
    return [
        *([f"learning rate {', '.join(shown)}{more}"] if shown else []),
        *([f"gradient norm {wording.number(norm)}"] if isinstance(norm, (int, float)) else []),
    ]


def is_called_only(step: Steps) -> bool:
    """Whether a model was called but no step has been trained.

    Args:
        step: returned by `hookd.tool.reports.report.describe_steps`, perhaps of another version of hookd.
    """
    return bool(step.get("calls")) and not step.get("counted")


def counted(step: Steps) -> tuple[str, int]:
    """Return in a few words what is counted, and the count."""
    if is_called_only(step):
        return "calls of the model, no step", step["calls"]
    return "step" if step["is_absolute"] else "steps since the attach", step["current"]
