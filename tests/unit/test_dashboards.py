"""The dashboards for Grafana: as generated, valid PromQL, of existing metrics, clean by Grafana's linter.

The rules are those of grafana/dashboard-linter (docs/rules), by their names there. All of its rules for Prometheus are here;
where a rule cannot hold for a dashboard or a panel, an exception says why.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys

import pytest
import yaml

from tests.support import dashboards
from tests.support.dashboards import PATHS, chosen, every_query, panels, queries, read, variables
from tests.support.deployment import DEPLOY, ROOT, run

needs_sdk = pytest.mark.skipif(
    importlib.util.find_spec("grafana_foundation_sdk") is None, reason="no grafana-foundation-sdk here (Python 3.11)"
)
all_dashboards = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
OF_NODES = ("hookd-fleet", "hookd-health")
"""The others are of one run. Its ranks are scraped from several instances, and from several jobs if some pods have a sidecar,
so a choice of job or instance would split a run. No other exporter uses hookd's names."""


# ---- generation


@needs_sdk
def test_the_dashboards_are_those_that_the_generator_makes(tmp_path):
    code, output = run(sys.executable, DEPLOY / "grafana" / "generate.py", tmp_path)
    assert code == 0, output
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_text() for path in PATHS}, "old: run python deploy/grafana/generate.py"


@needs_sdk
@pytest.mark.filterwarnings("ignore:Prefer using dashboardv2")
@all_dashboards
def test_grafanas_own_model_reads_a_dashboard_and_writes_it_alike(path):
    """The model is generated from Grafana's schema; the published @grafana/schema contains the same as TypeScript."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    again = json.loads(JSONEncoder().encode(Dashboard.from_json(read(path))))
    assert not lost(read(path), again)


def lost(before, after, place=""):
    """Return the paths in one JSON that are missing in the other."""
    if isinstance(before, dict):
        return [one for key in before for one in lost(before[key], (after or {}).get(key), f"{place}/{key}")]
    if isinstance(before, list):
        pairs = zip(before, after or [None] * len(before), strict=True)
        return [one for number, (a, b) in enumerate(pairs) for one in lost(a, b, f"{place}/{number}")]
    return [] if before == after else [place]


def test_the_dashboards_have_names_of_their_own():
    assert [path.stem for path in PATHS] == ["hookd-fleet", "hookd-health", "hookd-module", "hookd-ranks", "hookd-run"]
    assert [read(path)["uid"] for path in PATHS] == [path.stem for path in PATHS]
    assert len({read(path)["title"] for path in PATHS}) == len(PATHS)


@all_dashboards
def test_panels_have_numbers_of_their_own_and_do_not_overlap(path):
    rows = [one for one in read(path)["panels"] if one["type"] == "row"]
    shown = [*rows, *panels(read(path))]
    assert len({one["id"] for one in shown}) == len(shown)
    tiles = [
        (x, y)
        for one in shown
        for x in range(one["gridPos"]["x"], one["gridPos"]["x"] + one["gridPos"]["w"])
        for y in range(one["gridPos"]["y"], one["gridPos"]["y"] + one["gridPos"]["h"])
    ]
    assert len(set(tiles)) == len(tiles)
    assert max(x for x, _ in tiles) == 23


@all_dashboards
def test_rows_of_plugins_that_are_not_loaded_by_default_are_collapsed_and_no_others(path):
    for row in read(path)["panels"]:
        if row["type"] == "row":
            assert row["collapsed"] == bool(row["panels"]) == ("(plugin" in row["title"]), row["title"]
    open_panels = [one for one in read(path)["panels"] if one["type"] != "row"]
    families = set(re.findall(r"hookd_([a-z]+)_", json.dumps([one["targets"] for one in open_panels])))
    assert not families & {"optimizer", "gradclip", "memory", "coverage", "capture"}


@all_dashboards
def test_links_lead_to_dashboards_that_there_are_and_keep_time_and_choices(path):
    dashboard = read(path)
    (others,) = dashboard["links"]
    assert (others["type"], others["tags"], others["includeVars"], others["keepTime"]) == (
        "dashboards",
        ["hookd"],
        True,
        True,
    )
    assert dashboard["tags"] == ["hookd"]
    for address in re.findall(r'"url": "(/d/[^"]+)"', path.read_text()):
        known = {
            variable["name"]
            for variable in read(DEPLOY / "grafana" / f"{address.split('/')[2]}.json")["templating"]["list"]
        }
        given = set(re.findall(r"var-(\w+)=|\$\{(\w+):queryparam\}", address))
        assert {one or other for one, other in given} <= known
        assert "${datasource:queryparam}" in address
        assert "${__url_time_range}" in address


# ---- queries


def test_every_query_is_promql(tmp_path):
    """`promtool check rules` accepts only queries that Prometheus accepts."""
    found = every_query()
    assert len(found) > 100
    rules = [{"record": f"hookd:query:{n}", "expr": chosen(query.expr)} for n, query in enumerate(found)]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    code, output = run("promtool", "check", "rules", file)
    assert code == 0, output
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": [{"record": "a", "expr": "rate(a)"}]}]}))
    assert run("promtool", "check", "rules", file)[0] != 0


def test_every_metric_is_one_that_hookd_has():
    code = "".join(path.read_text() for path in (ROOT / "hookd").rglob("*.py"))
    known = set(re.findall(r'"(hookd_\w+)"', code)) | set(
        re.findall(r"`(hookd_\w+)`", (ROOT / "plugins/README.md").read_text())
    )
    known |= {f"{name}_total" for name in known} | {"hookd_build_info"}
    used = {name for query in every_query() for name in re.findall(r"\b(hookd_\w+)", query.expr)}
    assert len(used) > 50
    assert not {re.sub(r"_(bucket|sum|count)$", "", name) for name in used} - known


def test_no_query_sums_gradient_norms():
    """Norms do not add up; `hookd_activations_total_grad_norm` is that of all gradients, also of modules that are not served."""
    norms = [query for query in every_query() if "grad_norm" in query.expr]
    assert {query.dashboard for query in norms} == {"hookd-run", "hookd-module"}
    assert not [query.place for query in norms if "sum" in query.expr]
    of_runs = [query.expr for query in norms if query.dashboard == "hookd-run"]
    assert all("hookd_activations_total_grad_norm" in expr for expr in of_runs)


# ---- the linter's rules


def by_name(dashboard):
    return {one["name"]: one for one in dashboard["templating"]["list"]}


@all_dashboards
def test_template_datasource_rule(path):
    (source,) = [one for one in read(path)["templating"]["list"] if one["type"] == "datasource"]
    assert (source["name"], source["label"], source["query"]) == ("datasource", "Data source", "prometheus")


@all_dashboards
def test_template_job_rule_and_template_instance_rule_and_template_variable_matchers_rule(path):
    dashboard = read(path)
    chosen_of = by_name(dashboard)
    assert ({"job", "instance"} <= set(chosen_of)) == (dashboard["uid"] in OF_NODES)
    several = [one for one in chosen_of.values() if one["name"] not in ("datasource", "run")]  # a page is of one run
    assert len(several) > 0
    for one in several:
        assert (one["type"], one["multi"], one["includeAll"], one["allValue"]) == ("query", True, True, ".+")
        assert one["label"] == one["name"].title()


@all_dashboards
def test_template_label_promql_rule_and_template_on_time_change_reload_rule(path):
    dashboard = read(path)
    assert variables(dashboard)  # their contents are parsed above
    asked = [one for one in dashboard["templating"]["list"] if one["type"] == "query"]
    assert {one["refresh"] for one in asked} == {2}


@all_dashboards
def test_panel_datasource_rule(path):
    dashboard = read(path)
    asking = [*panels(dashboard), *(one for panel in panels(dashboard) for one in panel["targets"])]
    asking += [one for one in dashboard["templating"]["list"] if one["type"] == "query"]
    asking += dashboard["annotations"].get("list", [])
    assert {(one["datasource"]["type"], one["datasource"]["uid"]) for one in asking} == {
        ("prometheus", "${datasource}")
    }


@all_dashboards
def test_panel_title_description_rule(path):
    found = panels(read(path))
    assert all(len(one["title"]) > 2 and one["description"].endswith(".") for one in found)


UNITS = {"none", "string", "short", "percentunit", "sci", "flops", "bytes", "s", "cps", "bool_yes_no"}
"""Units that the linter and Grafana know, as far as they are used."""


@all_dashboards
def test_panel_units_rule(path):
    """Panels with words for their values need no unit."""
    found = [one["fieldConfig"] for one in panels(read(path))]
    assert {one["defaults"]["unit"] for one in found} <= UNITS
    overridden = [value for one in found for override in one["overrides"] for value in override["properties"]]
    assert {one["value"] for one in overridden if one["id"] == "unit"} <= UNITS


@all_dashboards
def test_panel_no_targets_rule(path):
    assert all(one["targets"] for one in panels(read(path)))
    for panel in panels(read(path)):
        letters = [one["refId"] for one in panel["targets"]]
        assert len(set(letters)) == len(letters)


GROWING = re.compile(r"(\w*)\(\s*(\w+(?:_total|_sum|_count|_bucket))\{[^}]*\}(\[[^]]*\])?")
STANDING = {"hookd_incidents_total", "hookd_nan_nonfinite_total", "hookd_series_dropped_total", "hookd_attach_total",
            "hookd_attach_pause_seconds_bucket", "hookd_collectives_total"}  # fmt: skip
"""Counters that are shown as they are. Those of collectives are compared with each other. Many of the other series begin with
their first event, which `increase` misses; and the few events of a day would be missing from every panel of the last hour."""


@all_dashboards
def test_target_counter_agg_rule(path):
    for query in queries(read(path)):
        for function, name, _ in GROWING.findall(query.expr):
            assert function == "rate" or name in STANDING, f"{query.place}: {query.expr}"


@all_dashboards
def test_target_rate_interval_rule(path):
    for query in queries(read(path)):
        ranges = re.findall(r"\b(?:i?rate|increase)\(\w+\{[^}]*\}\[([^]]*)\]", query.expr)
        assert set(ranges) <= {"$__rate_interval"}
        assert len(ranges) == len(re.findall(r"\b(?:i?rate|increase)\(", query.expr)), query.place


@all_dashboards
def test_target_job_rule_and_target_instance_rule_and_target_required_matchers_rule(path):
    dashboard = read(path)
    for query in queries(dashboard):
        matched = re.findall(r"\b\w+\{([^}]*)\}", query.expr)
        assert matched
        wanted = ('job=~"$job"', 'instance=~"$instance"') if dashboard["uid"] in OF_NODES else ('run="$run"',)
        assert all(set(wanted) <= set(one.split(", ")) for one in matched), f"{query.place}: {query.expr}"
        assert len(re.findall(r"\b(?:hookd|scrape)_\w+", query.expr)) == len(matched), query.place


@all_dashboards
def test_uneditable_dashboard_rule(path):
    assert read(path)["editable"] is False


def test_the_variables_of_a_query_are_those_of_its_dashboard():
    for path in PATHS:
        known = set(by_name(read(path))) | {"__rate_interval", "__interval", "__range"}
        asked = [*queries(read(path)), *variables(read(path))]
        used = {name for query in asked for name in re.findall(r"\$\{?([a-z_]\w*)", query.expr)}
        assert used <= known, path.stem
        assert set(dashboards.EVERYTHING) & known - {"module"} <= used
