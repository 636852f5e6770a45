"""Check the names and labels of metrics.

The rules are promtool's and hookd's own (prefix, bounded labels).
"""

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
# Source of the units and prefixes: client_golang/prometheus/util/promlint/validations.
_PREFIXES = ("pico", "nano", "micro", "milli", "centi", "deci", "deca", "hecto", "kilo", "mega", "giga", "tera", "peta",
             "kibi", "mebi", "gibi", "tebi", "pebi")  # fmt: skip
_UNITS = ("seconds", "bytes", "meters", "metres", "grams", "amperes", "joules", "volts")
_BASE = {
    **{prefix + unit: unit for prefix in _PREFIXES for unit in _UNITS},
    **{prefix + "bits": "bytes" for prefix in ("", *_PREFIXES)},
    **dict.fromkeys(("minutes", "hours", "days", "weeks", "ms", "us", "ns", "secs", "sec"), "seconds"),
    **dict.fromkeys(("kb", "mb", "gb", "kib", "mib", "gib"), "bytes"),
    **dict.fromkeys(("percent", "percentage", "pct"), "ratio"),
    **dict.fromkeys(("inches", "yards", "miles"), "meters"),
    "calories": "joules", "pounds": "grams", "ounces": "grams", "fahrenheit": "celsius", "rankine": "celsius",
}  # fmt: skip
"""The base unit for each other unit in a name."""
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
"""By the part of a plugin: labels that hookd or Prometheus add, and labels with an unbounded number of values."""
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
    side: str = "target",  # noqa: A002
) -> Iterator[Problem]:
    """Yield the problems of one metric that a plugin declares.

    Args:
        kind: counter, gauge or histogram.
        name: as the plugin declares it, without `hookd_<plugin>_` and without `_total`.
        help: the help text.
        labels: names of the labels.
        file: of the declaration.
        line: of the declaration.
        side: part of the plugin that declares it, "target" or "daemon".
    """
    reserved, unbounded = _LABELS[side]

    def problem(rule: str, message: str, fix: str, *, is_warning: bool = False) -> Problem:
        return Problem(file, line, rule, message, fix, is_warning)

    words = name.split("_")
    if not NAME.match(name) or "__" in name:
        yield problem("metric", f"{name!r} is not a valid metric name", "use lower-case words with single underscores")
    if name.startswith("hookd_"):
        yield problem(
            "metric",
            f"{name!r} begins with 'hookd_', which hookd adds itself",
            "leave out 'hookd_' and the plugin's name",
        )
    if words[-1] == "total":
        yield problem("metric", f"{name!r} ends with '_total', which hookd adds to counters", f"call it {name[:-6]!r}")
    elif words[-1] in ("count", "sum", "bucket") or (words[-1] == "info" and (kind == "counter" or side == "daemon")):
        yield problem(
            "metric", f"{name!r} ends with {words[-1]!r}, which belongs to histograms", "name what is counted"
        )
    for word in words:
        if word in _BASE:
            yield problem("metric", f"{name!r} is in {word}; metrics are in base units", f"convert it to {_BASE[word]}")
        if word in _KIND_WORDS:
            yield problem("metric", f"{name!r} has its type in its name", f"leave out {word!r}")
    if not help.strip():
        yield problem("metric", f"{name!r} has no help text", "describe it in a sentence, with its unit")
    for label in labels:
        if not NAME.match(label) or label.startswith("__"):
            yield problem("label", f"{label!r} is not a valid name for a label of {name!r}", "use a lower-case word")
        elif label == "le" and kind != "histogram":
            yield problem(
                "label", f"the label 'le' of {name!r} belongs to histograms", "use another name", is_warning=True
            )
        elif label in reserved:
            yield problem(
                "label", f"the label {label!r} of {name!r} is hookd's own", "leave it out: every series has it"
            )
        elif label in unbounded:
            yield problem("label", f"the label {label!r} of {name!r} has unbounded values: each one creates a series",
                          "remove it; use a number as the value" + ("" if side == "daemon" else ", or report it with context.incident(…)"))  # fmt: skip
    if len(labels) > 4:
        yield problem(
            "label",
            f"{name!r} has {len(labels)} labels",
            "use at most four: the number of series multiplies",
            is_warning=True,
        )


def declared(file: Path, side: str = "target") -> Iterator[Problem]:
    """Yield the problems of a file's metrics, and of uses of their labels.

    Only declarations whose name is a literal are checked.
    """
    for metric in _declarations(file, side):
        yield from lint(
            metric.kind, metric.name, metric.help, metric.labels, file=str(file), line=metric.line, side=side
        )
    if side == "target":
        yield from _uses(file, parsed(file))


def twice(side: Subject, other: Subject) -> Iterator[Problem]:
    """Yield a problem for each metric that both parts of a plugin declare.

    The metric of the daemon plugin is not served then.

    Args:
        side: the daemon plugin.
        other: the part of the same plugin that runs in targets.
    """
    theirs = {metric.name for file in other.files for metric in _declarations(file, other.side)}
    for file in side.files:
        for metric in _declarations(file, side.side):
            if metric.name in theirs:
                yield Problem(str(file), metric.line, "metric", f"{metric.name!r} is also declared by the plugin in targets, and is served only from there",
                              "use another name")  # fmt: skip


class _Declaration(NamedTuple):
    """The declaration of a metric."""

    kind: str
    name: str
    help: str
    labels: Sequence[str]
    line: int


def _declarations(file: Path, side: str) -> Iterator[_Declaration]:
    """Yield the metrics that a file declares with a literal name."""
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in KINDS:
            arguments = _arguments(node, side)
            name, text = (_constant(arguments[key]) if key in arguments else None for key in ("name", "help"))
            if isinstance(name, str):
                help_text = text if isinstance(text, str) else "unknown"
                yield _Declaration(node.func.attr, name, help_text, _label_names(arguments.get("labels")), node.lineno)


def _label_names(node: ast.expr | None) -> list[str]:
    """Return the literal labels of a declaration, from a list of names or a dict."""
    names = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
    return [name.value for name in names if isinstance(name, ast.Constant) and isinstance(name.value, str)]


def _arguments(node: ast.Call, side: str = "target") -> dict[str, ast.expr]:
    return {
        **dict(zip(_ORDER[side], node.args, strict=False)),
        **{keyword.arg: keyword.value for keyword in node.keywords if keyword.arg},
    }


def _constant(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def _uses(file: Path, tree: ast.Module) -> Iterator[Problem]:
    """Yield the uses of metrics with a wrong number of label values, and of undeclared metrics."""
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
            yield Problem(str(file), node.lineno, "label", f"self.{metric.attr} has labels, but no values are given here",
                          f"write self.{metric.attr}.labels(…).{node.func.attr}(…)")  # fmt: skip
        if node.func.attr != "labels":
            continue
        if not isinstance(metric, ast.Attribute) or any(isinstance(value, ast.Starred) for value in node.args):
            continue
        expected = metrics.get(metric.attr)
        if expected is None and metrics and _is_self(metric) and not _assigned_elsewhere(tree, metric.attr):
            yield Problem(str(file), node.lineno, "metric", f"self.{metric.attr} was never declared",
                          nearest(metric.attr, metrics))  # fmt: skip
        elif expected is not None and 0 <= expected != len(node.args):
            yield Problem(str(file), node.lineno, "label", f"self.{metric.attr} has {expected} labels, but {len(node.args)} values are given",
                          "pass one value for each label, in their order")  # fmt: skip


def _is_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def _assigned_elsewhere(tree: ast.Module, name: str) -> bool:
    attributes = (
        node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    )
    return any(attribute.attr == name for attribute in attributes)
