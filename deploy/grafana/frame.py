"""Shared by the dashboards: their names, the variables at their heads, the links between them, the annotations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.models import dashboard as model
from panels import SOURCE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from panels import Panel

TAG = "hookd"
TIME = "${datasource:queryparam}&${__url_time_range}"
TO_RUN = f"/d/hookd-run/?{TIME}&var-run=${{__data.fields.run}}"
TO_MODULE = f"/d/hookd-module/?{TIME}&${{run:queryparam}}&${{rank:queryparam}}&var-module=${{__data.fields.module}}"
_ALL = model.VariableOption(selected=True, text="All", value="$__all")
_ROOT = model.VariableOption(selected=True, text=["(root)"], value=["(root)"])
_MODULES = (
    '{__name__=~"hookd_(timing_forward_calls_total|activations_.+|coverage_elements)", run="$run", rank=~"$rank"}'
)
_NEW_INCIDENTS = (
    'hookd_incidents_total{run="$run", rank=~"$rank"} > '
    '(max_over_time(hookd_incidents_total{run="$run", rank=~"$rank"}[5m] offset $__interval)'
    ' or 0 * hookd_incidents_total{run="$run", rank=~"$rank"})'
)
"""increase() misses the first event of a kind, because its series begins with that event."""


def dashboard(uid: str, title: str, text: str, variables: Iterable[model.VariableModel]) -> build.Dashboard:
    """Return an empty dashboard. Its uid is in addresses that people keep, so it never changes."""
    made = build.Dashboard(f"hookd / {title}").uid(uid).description(text).tags([TAG]).readonly()
    made = made.time("now-1h", "now").refresh("30s").timezone("browser").tooltip(model.DashboardCursorSync.CROSSHAIR)
    return made.variables([_datasource(), *variables]).link(_others())


def of_nodes() -> list[build.QueryVariable]:
    """Return the variables of dashboards about nodes."""
    return [
        _variable("job", "Job", "label_values(hookd_build_info, job)"),
        _variable("instance", "Instance", 'label_values(hookd_build_info{job=~"$job"}, instance)'),
    ]


def of_run() -> list[build.QueryVariable]:
    """Return the variables of dashboards about one run."""
    run = build.QueryVariable("run").label("Run").query(_query("label_values(hookd_target_info, run)"))
    run = run.datasource(SOURCE).refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
    rank = _variable("rank", "Rank", 'label_values(hookd_target_info{run="$run"}, rank)')
    return [run.sort(model.VariableSort.ALPHABETICAL_ASC), rank.sort(model.VariableSort.NUMERICAL_ASC)]


def of_module() -> list[build.QueryVariable]:
    """Return the variables of a dashboard about modules of one run; at first only the root, as there may be hundreds."""
    module = _variable("module", "Module", f"label_values({_MODULES}, module)")
    return [*of_run(), module.current(_ROOT)]


def with_incidents(made: build.Dashboard) -> build.Dashboard:
    """Mark in all curves when an incident was reported."""
    query = build.AnnotationQuery().name("Incidents").datasource(SOURCE).enable(True).icon_color("red")
    query = query.expr(_NEW_INCIDENTS).title_format("{{kind}}").text_format("rank {{rank}}")
    return made.annotation(query)


def filled(made: build.Dashboard, sections: dict[str, list[Panel]]) -> build.Dashboard:
    """Put panels into a dashboard, below the heading of their section.

    A section whose heading names plugins is collapsed: these are loaded by name only, so most trainings have no data for it.
    """
    for head, panels in sections.items():
        row = build.Row(head)
        if "(plugin" in head:
            for panel in panels:
                row = row.with_panel(panel)
            made = made.with_row(row)
            continue
        made = made.with_row(row)
        for panel in panels:
            made = made.with_panel(panel)
    return made


def _datasource() -> build.DatasourceVariable:
    return build.DatasourceVariable("datasource").label("Data source").type("prometheus")


def _variable(name: str, label: str, query: str) -> build.QueryVariable:
    made = build.QueryVariable(name).label(label).query(_query(query)).datasource(SOURCE).multi(True)
    made = made.include_all(True).all_value(".+").current(_ALL).sort(model.VariableSort.ALPHABETICAL_ASC)
    return made.refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)


def _query(text: str) -> dict[str, object]:
    return {"query": text, "refId": "StandardVariableQuery"}


def _others() -> build.DashboardLink:
    link = build.DashboardLink("hookd").type(model.DashboardLinkType.DASHBOARDS).tags([TAG])
    return link.include_vars(True).keep_time(True).as_dropdown(False)
