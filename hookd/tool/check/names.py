"""Whether metrics are named as Prometheus wants it (promtool's rules) and hookd (prefix, bounded labels)."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from hookd import serving
from hookd.api.compatibility import nearest
from hookd.tool.check.imports import parsed
from hookd.tool.check.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from hookd.tool.check.source import Subject

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
_LABELS = {"target": (_OURS, _UNBOUNDED), "daemon": (tuple(serving.RESERVED_LABELS), tuple(serving.UNBOUNDED))}
"""Of each half: labels that are put there by others, and those that have a new value for ever."""
_ORDER = {"target": ("name", "help", "labels"), "daemon": ("name", "help", "value", "labels")}
NAME = re.compile(r"[a-z][a-z0-9_]*$")


def lint(
    kind: str,
    name: str,
    help: str,  # noqa: A002
    labels: Sequence[str],
    *,
    file: str,
    line: int,
    half: str = "target",  # noqa: A002
) -> Iterator[Problem]:
    """Give what is wrong with a metric as a plugin declares it.

    Args:
        kind: counter, gauge or histogram.
        name: what the plugin says: without `hookd_<plugin>_` and without `_total`.
        help: the sentence.
        labels: their names.
        file: of the declaration.
        line: of the declaration.
        half: of the plugin that declares it, "target" or "daemon".
    """
    reserved, unbounded = _LABELS[half]

    def told(rule: str, message: str, fix: str, *, is_warning: bool = False) -> Problem:
        return Problem(file, line, rule, message, fix, is_warning)

    words = name.split("_")
    if not NAME.match(name) or "__" in name:
        yield told("metric", f"{name!r} is no name for a metric", "use lower-case words with single underscores")
    if name.startswith("hookd_"):
        yield told(
            "metric",
            f"{name!r} begins with 'hookd_', which is put before it anyway",
            "leave out 'hookd_' and the plugin's name",
        )
    if words[-1] == "total":
        yield told("metric", f"{name!r} ends with '_total', which counters get by themselves", f"call it {name[:-6]!r}")
    elif words[-1] in ("count", "sum", "bucket", "info") and (kind == "counter" or half == "daemon"):
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
        elif label in reserved:
            yield told("label", f"the label {label!r} of {name!r} is hookd's own", "leave it out: every series has it")
        elif label in unbounded:
            yield told("label", f"the label {label!r} of {name!r} has a new value ever again: each makes a series",
                       "take it out; put a number into the value" + ("" if half == "daemon" else ", or tell it with context.incident(…)"))  # fmt: skip
    if len(labels) > 4:
        yield told("label", f"{name!r} has {len(labels)} labels", "use four at most: they multiply", is_warning=True)


def declared(file: Path, half: str = "target") -> Iterator[Problem]:
    """Lint the declarations of a file whose name is written there, and the uses of their labels."""
    for one in _declarations(file, half):
        yield from lint(one.kind, one.name, one.help, one.labels, file=str(file), line=one.line, half=half)
    if half == "target":
        yield from _uses(file, parsed(file))


def twice(half: Subject, other: Subject) -> Iterator[Problem]:
    """Give the metrics of a daemon half that the target half declares, too: those of the daemon are not served then."""
    theirs = {one.name for file in other.files for one in _declarations(file, other.half)}
    for file in half.files:
        for one in _declarations(file, half.half):
            if one.name in theirs:
                yield Problem(str(file), one.line, "metric", f"{one.name!r} is a metric of the half in targets, and is served from there alone",
                              "call it otherwise")  # fmt: skip


class _Declaration(NamedTuple):
    """A metric as it is written down."""

    kind: str
    name: str
    help: str
    labels: Sequence[str]
    line: int


def _declarations(file: Path, half: str) -> Iterator[_Declaration]:
    """Give what a file declares, as far as the name is written there."""
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in KINDS:
            arguments = _arguments(node, half)
            name, text = (_constant(arguments[key]) if key in arguments else None for key in ("name", "help"))
            if isinstance(name, str):
                sentence = text if isinstance(text, str) else "unknown"
                yield _Declaration(node.func.attr, name, sentence, _label_names(arguments.get("labels")), node.lineno)


def _label_names(node: ast.expr | None) -> list[str]:
    """Give the labels that are written in a declaration: a list of names, or a dict of names and values."""
    written = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
    return [one.value for one in written if isinstance(one, ast.Constant) and isinstance(one.value, str)]


def _arguments(node: ast.Call, half: str = "target") -> dict[str, ast.expr]:
    is_histogram = getattr(node.func, "attr", "") == "histogram"
    order = ("name", "help", "buckets", "labels") if is_histogram else _ORDER[half]
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
