"""The rules for Prometheus in deploy/ are right, find what they must, and each alert is explained and tested."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest
import yaml

from hookd.target.plugins.core_metrics import PLUGIN_STATES
from hookd.tool.daemon.fleet.targets import STATES, Target
from hookd.tool.daemon.metrics.collector import AttachCounter, FleetCollector
from hookd.tool.daemon.metrics.selection import Limits
from hookd.tool.daemon.watch.drift import Drift
from hookd.tool.daemon.watch.hangs import ROLES, Hangs
from hookd.tool.daemon.watch.stragglers import Stragglers
from hookd.wire.page import PageWriter
from tests.support.environment import REPOSITORY

RULES = REPOSITORY / "deploy" / "prometheus" / "rules"
TESTS = RULES.parent / "tests"
NAMES = sorted(one.name for one in RULES.glob("*.rules.yml"))
PAGE = "docs/alerts.md"
WORDS = {
    ("hookd_plugin_state", "state"): PLUGIN_STATES,
    ("hookd_target_state", "state"): STATES,
    ("hookd_hang", "role"): ROLES,
    ("hookd_activations_finding", "kind"): ("exploding",),
    ("hookd_incidents_total", "kind"): ("exploding",),
}
"""What a label may be in the rules."""


def rules():
    """Yield every rule with the name of its file."""
    for name in NAMES:
        for group in yaml.safe_load((RULES / name).read_text())["groups"]:
            for rule in group["rules"]:
                yield name, rule


ALERTS = [(name, rule) for name, rule in rules() if "alert" in rule]


def promtool(*arguments):
    done = subprocess.run(["promtool", *arguments], cwd=RULES, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool (Debian: prometheus)")
@pytest.mark.parametrize("rules", NAMES)
def test_rules_are_valid_and_pass_their_own_tests(rules):
    promtool("check", "rules", rules)
    promtool("test", "rules", f"../tests/{rules.replace('.rules.yml', '.test.yml')}")


@pytest.mark.parametrize(("name", "rule"), ALERTS, ids=[rule["alert"] for _, rule in ALERTS])
def test_an_alert_is_tested_where_it_fires_and_where_it_does_not(name, rule):
    tests = yaml.safe_load((TESTS / name.replace(".rules.yml", ".test.yml")).read_text())["tests"]
    cases = [case for one in tests for case in one.get("alert_rule_test", ()) if case["alertname"] == rule["alert"]]
    assert any(case["exp_alerts"] for case in cases)
    assert any(not case["exp_alerts"] for case in cases)


@pytest.mark.parametrize("rule", [rule for _, rule in ALERTS], ids=[rule["alert"] for _, rule in ALERTS])
def test_an_alert_says_how_grave_it_is_and_where_to_read_on(rule):
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    assert rule["annotations"]["runbook_url"] == f"{PAGE}#{rule['alert'].lower()}"


def test_every_alert_has_a_section_in_the_docs_and_no_other_has():
    sections = re.findall(r"^### (\w+)$", (REPOSITORY / PAGE).read_text(), re.MULTILINE)
    assert sorted(sections) == sorted(rule["alert"] for _, rule in ALERTS)


def of_the_daemon():
    """Scrape a daemon with one target: this very process."""
    page = PageWriter.create({"pid": os.getpid(), "run": "r", "rank": "0", "script": "s"})
    page.set_state("running")
    target = Target(os.getpid(), os.dup(page.fd))
    try:
        fleet = type("Fleet", (), {"targets": lambda _: [target]})()
        watchers = [declared for watcher in (Hangs, Stragglers, Drift) for declared in watcher.families]
        scraped = FleetCollector(fleet, AttachCounter(), Limits()).collect()
        return {sample.name for family in scraped for sample in family.samples} | {one.name for one in watchers}
    finally:
        target.close()
        page.close()


def of_the_agent():
    """Yield the metrics that code in targets makes, by the calls that make them."""
    for path in (REPOSITORY / "hookd" / "target").rglob("*.py"):
        for kind, name in re.findall(r'\b(Counter|Gauge)\(\s*page,\s*"(\w+)"', path.read_text()):
            yield name + ("_total" if kind == "Counter" else "")
    for path in (REPOSITORY / "plugins").glob("hookd_*/*.py"):
        for kind, name in re.findall(r'\bcontext\.(counter|gauge)\(\s*"(\w+)"', path.read_text()):
            yield f"{path.parent.name}_{name}" + ("_total" if kind == "counter" else "")


def test_rules_use_no_metric_that_hookd_does_not_make():
    made = of_the_daemon() | set(of_the_agent())
    text = " ".join(rule["expr"] for _, rule in rules())
    recorded = {rule["record"] for _, rule in rules() if "record" in rule}
    used = set(re.findall(r"[\w:]*\bhookd_[\w:]+", text))
    assert len(used - recorded) > 15
    assert used <= made | recorded


def test_rules_name_only_states_that_there_are():
    text = " ".join(rule["expr"] for _, rule in rules())
    found = set()
    for metric, label, value in re.findall(r'\b(hookd_\w+)\{(\w+)="(\w+)"\}', text):
        if (metric, label) in WORDS:
            found.add((metric, label))
            assert value in WORDS[metric, label]
    assert found == set(WORDS)
