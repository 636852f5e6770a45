"""Whether metrics are named as Prometheus wants it (promtool's rules) and hookd (prefix, bounded labels)."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Any

from hookd.api import nearest
from hookd.check.problem import Problem
from hookd.check.source import parsed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

KINDS = ("counter", "gauge", "histogram")
# client_golang/prometheus/util/promlint/validations: units that are not base units, by the last words of a name.
_BASE = {
    "milliseconds": "seconds", "microseconds": "seconds", "nanoseconds": "seconds", "ms": "seconds", "us": "seconds",
    "ns": "seconds", "minutes": "seconds", "hours": "seconds", "days": "seconds", "secs": "seconds", "sec": "seconds",
    "kilobytes": "bytes", "megabytes": "bytes", "gigabytes": "bytes", "kb": "bytes", "mb": "bytes", "gb": "bytes",
    "mib": "bytes", "kib": "bytes", "gib": "bytes", "bits": "bytes", "percent": "ratio", "percentage": "ratio", "pct": "ratio",
    "celsius_degrees": "celsius", "fahrenheit": "celsius", "kilograms": "grams", "kelvin": "celsius",
}  # fmt: skip
_KIND_WORDS = ("counter", "gauge", "histogram", "summary", "metric")
_CHANGES = ("inc", "set", "observe")
_OURS = ("run", "rank", "le", "quantile")
_UNBOUNDED = (
    "step",
    "epoch",
    "iteration",
    "batch",
    "shape",
    "time",
    "timestamp",
    "message",
    "error_message",
    "value",
    "id",
    "uuid",
)
NAME = re.compile(r"[a-z][a-z0-9_]*$")


def lint(kind: str, name: str, help: str, labels: Sequence[str], *, file: str, line: int) -> Iterator[Problem]:  # noqa: A002
    """Give what is wrong with a metric as a plugin declares it.

    Args:
        kind: counter, gauge or histogram.
        name: what the plugin says: without `hookd_<plugin>_` and without `_total`.
        help: the sentence.
        labels: their names.
        file: of the declaration.
        line: of the declaration.
    """

    def told(rule: str, message: str, fix: str, *, is_warning: bool = False) -> Problem:
        return Problem(file, line, rule, message, fix, is_warning)

    words = name.split("_")
    if not NAME.match(name) or "__" in name:
        yield told("metric", f"{name!r} is no name for a metric", "use lower-case words with single underscores")
    if name.startswith("hookd_"):
        yield told("metric", f"{name!r} begins with 'hookd_', which is put before it anyway", f"call it {name[6:]!r}")
    if words[-1] == "total":
        yield told("metric", f"{name!r} ends with '_total', which counters get by themselves", f"call it {name[:-6]!r}")
    elif kind != "histogram" and words[-1] in ("count", "sum", "bucket", "info") and kind == "counter":
        yield told("metric", f"{name!r} ends with {words[-1]!r}, which belongs to histograms", "name what is counted")
    for word in words:
        if word in _BASE:
            yield told("metric", f"{name!r} is in {word}; metrics are in base units", f"give it in {_BASE[word]}")
        if word in _KIND_WORDS:
            yield told("metric", f"{name!r} has its type in its name", f"leave {word!r} out")
    if not help.strip():
        yield told("metric", f"{name!r} has no help text", "say in a sentence what it is, with its unit")
    for label in labels:
        if not NAME.match(label) or label.startswith("__"):
            yield told("label", f"{label!r} is no name for a label of {name!r}", "use a lower-case word")
        elif label == "le" and kind != "histogram":
            yield told(
                "label", f"the label 'le' of {name!r} belongs to histograms", "call it otherwise", is_warning=True
            )
        elif label in _OURS:
            yield told("label", f"the label {label!r} of {name!r} is hookd's own", "leave it out: every series has it")
        elif label in _UNBOUNDED:
            yield told("label", f"the label {label!r} of {name!r} has a new value ever again: each makes a series",
                       "take it out; put a number into the value, or tell it with context.incident(…)")  # fmt: skip
    if len(labels) > 4:
        yield told("label", f"{name!r} has {len(labels)} labels", "use four at most: they multiply", is_warning=True)


def declared(file: Path) -> Iterator[Problem]:
    """Lint the declarations of a file whose name is written there, and the uses of their labels."""
    tree = parsed(file)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in KINDS:
            given = {key: _constant(value) for key, value in _arguments(node).items()}
            if isinstance(given.get("name"), str):
                labels = given.get("labels")
                names = [one for one in labels if isinstance(one, str)] if isinstance(labels, (list, tuple)) else []
                text = given.get("help", "unknown")
                sentence = text if isinstance(text, str) else "unknown"
                yield from lint(node.func.attr, str(given["name"]), sentence, names, file=str(file), line=node.lineno)
    yield from _uses(file, tree)


def _arguments(node: ast.Call) -> dict[str, ast.expr]:
    order = (
        ["name", "help", "buckets", "labels"]
        if getattr(node.func, "attr", "") == "histogram"
        else ["name", "help", "labels"]
    )
    return {**dict(zip(order, node.args, strict=False)), **{one.arg: one.value for one in node.keywords if one.arg}}


def _constant(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def _uses(file: Path, tree: ast.Module) -> Iterator[Problem]:
    """Look at `self.metric.labels(…)`: how many values there are, and that `self.metric` was declared."""
    metrics: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            call = node.value
            if isinstance(call.func, ast.Attribute) and call.func.attr in KINDS:
                labels = _arguments(call).get("labels")
                count = _constant(labels) if labels is not None else ()
                for target in node.targets:
                    if isinstance(target, ast.Attribute):
                        metrics[target.attr] = len(count) if isinstance(count, (list, tuple)) else -1
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        metric = node.func.value
        if node.func.attr in _CHANGES and isinstance(metric, ast.Attribute) and metrics.get(metric.attr, 0) > 0:
            yield Problem(str(file), node.lineno, "label", f"self.{metric.attr} has labels, and here are no values for them",
                          f"write self.{metric.attr}.labels(…).{node.func.attr}(…)")  # fmt: skip
        if node.func.attr != "labels":
            continue
        if not isinstance(metric, ast.Attribute) or any(isinstance(one, ast.Starred) for one in node.args):
            continue
        wanted = metrics.get(metric.attr)
        if wanted is None and metrics and _is_self(metric) and not _assigned_elsewhere(tree, metric.attr):
            yield Problem(str(file), node.lineno, "metric", f"self.{metric.attr} was never declared",
                          nearest(metric.attr, metrics))  # fmt: skip
        elif wanted is not None and 0 <= wanted != len(node.args):
            yield Problem(str(file), node.lineno, "label", f"self.{metric.attr} has {wanted} labels, here are {len(node.args)} values",
                          "give one value for each label, in their order")  # fmt: skip


def _is_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def _assigned_elsewhere(tree: ast.Module, name: str) -> bool:
    stores = (one for one in ast.walk(tree) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store))
    return any(one.attr == name for one in stores)
