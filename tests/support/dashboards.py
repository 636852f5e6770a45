"""The dashboards of deploy/grafana as a person at Grafana would have them: panels, and queries with all variables chosen."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from tests.support.deployment import DEPLOY

PATHS = sorted((DEPLOY / "grafana").glob("*.json"))
EVERYTHING = {"job": ".+", "instance": ".+", "run": "a-run", "rank": ".+", "module": ".+"}
"""What is chosen where nothing else is: one run, all else."""


class Query(NamedTuple):
    """One query of a dashboard, and where it is."""

    dashboard: str
    panel: str
    expr: str
    legend: str = ""

    @property
    def place(self) -> str:
        return f"{self.dashboard}: {self.panel}"


def read(path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8"))


def panels(dashboard) -> list[dict[str, Any]]:
    """Return the panels that show something; those of a collapsed row are inside of it."""
    rows = [one for one in dashboard["panels"] if one["type"] == "row"]
    return [
        *(one for one in dashboard["panels"] if one["type"] != "row"),
        *(one for row in rows for one in row["panels"]),
    ]


def queries(dashboard) -> list[Query]:
    """Return all queries of panels and annotations, as they are written."""
    name = dashboard["uid"]
    shown = [(panel["title"], one) for panel in panels(dashboard) for one in panel["targets"]]
    marks = dashboard["annotations"].get("list", ())
    return [
        *(Query(name, title, one["expr"], one.get("legendFormat", "")) for title, one in shown),
        *(Query(name, one["name"], one["expr"], one["titleFormat"] + one["textFormat"]) for one in marks),
    ]


def variables(dashboard) -> list[Query]:
    """Return the queries of a dashboard's variables, with the label that each takes as its legend."""
    asked = [one for one in dashboard["templating"]["list"] if one["type"] == "query"]
    found = [(one["name"], re.fullmatch(r"label_values\((.+), (\w+)\)", one["query"]["query"])) for one in asked]
    return [Query(dashboard["uid"], name, match[1], f"{{{{{match[2]}}}}}") for name, match in found]


def every_query() -> list[Query]:
    return [query for path in PATHS for query in (*queries(read(path)), *variables(read(path)))]


def chosen(expr, interval="1m", **variables) -> str:
    """Put values into a query, as Grafana does."""
    values = {**EVERYTHING, **variables, "__rate_interval": interval, "__interval": interval, "__range": interval}
    for name in sorted(values, key=len, reverse=True):
        expr = expr.replace(f"${{{name}}}", values[name]).replace(f"${name}", values[name])
    assert not re.search(r"\$(?!\d)", expr), expr  # $1 is a group of label_replace
    return expr
