"""The rules for Prometheus in deploy/ are right, find what they must, and each alert is explained and tested."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess

import pytest
import yaml

from hookd.target.plugins.core_metrics import PLUGIN_STATES
from hookd.tool.daemon.fingerprints.keeper import Keeper
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
OWN_TESTS = sorted(one.name for one in TESTS.glob("*.test.yml"))
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
OF_RUNS = [rule for _, rule in ALERTS if "by (run" in rule["expr"]]
"""The alerts about a training; the others are about a daemon."""
LINKS = {"page_url", "dashboard_url", "runbook_url"}
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="there is no promtool (Debian: prometheus)"
)


def promtool(*arguments):
    done = subprocess.run(["promtool", *arguments], cwd=RULES, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize("tests", OWN_TESTS)
def test_rules_are_valid_and_pass_their_own_tests(tests):
    promtool("check", "rules", *NAMES)
    promtool("test", "rules", f"../tests/{tests}")


@pytest.mark.parametrize(("name", "rule"), ALERTS, ids=[rule["alert"] for _, rule in ALERTS])
def test_an_alert_is_tested_where_it_fires_and_where_it_does_not(name, rule):
    tests = yaml.safe_load((TESTS / name.replace(".rules.yml", ".test.yml")).read_text())["tests"]
    cases = [case for one in tests for case in one.get("alert_rule_test", ()) if case["alertname"] == rule["alert"]]
    assert any(case["exp_alerts"] for case in cases)
    assert any(not case["exp_alerts"] for case in cases)


@pytest.mark.parametrize("rule", [rule for _, rule in ALERTS], ids=[rule["alert"] for _, rule in ALERTS])
def test_an_alert_says_how_grave_it_is_and_where_to_read_on(rule):
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert set(rule["annotations"]) == {"summary", "description", *(LINKS if rule in OF_RUNS else {"runbook_url"})}
    assert rule["annotations"]["runbook_url"] == f"{PAGE}#{rule['alert'].lower()}"
    texts = " ".join(rule["annotations"].values())
    assert not re.findall(r"\b(?:RUN|PID|RANK|NAME)\b", texts), "a command can be copied as it is"


def test_an_alert_about_a_training_is_one_for_a_run():
    about_daemons = {rule["alert"] for _, rule in ALERTS if rule not in OF_RUNS}
    assert about_daemons == {"HookdAttachBackingOff", "HookdDown", "HookdAbsent", "HookdScrapeGap", "HookdScrapeSlow"}
    for rule in OF_RUNS:
        kept = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
        assert kept <= {"run", "user", "plugin"}


@pytest.mark.parametrize("rule", OF_RUNS, ids=[rule["alert"] for rule in OF_RUNS])
def test_a_dashboard_of_an_alert_exists_and_shows_its_run(rule):
    uid, variable = re.match(
        r"d/([\w-]+)/\?var-(\w+)=\{\{ \$labels\.run ", rule["annotations"]["dashboard_url"]
    ).groups()
    dashboard = json.loads((REPOSITORY / "deploy" / "grafana" / f"{uid}.json").read_text())
    assert dashboard["uid"] == uid
    assert variable in {one["name"] for one in dashboard["templating"]["list"]}


def series(name, values, **labels):
    selector = ", ".join(f'{key}="{value}"' for key, value in labels.items())
    return {"series": f"{name}{{{selector}}}", "values": values}


def check(directory, inputs, *expected):
    """Run promtool on series of one sample per 30 s: each expectation is an expression, a time and its samples."""
    wanted = [
        {
            "expr": expr,
            "eval_time": when,
            "exp_samples": [{"labels": labels, "value": value} for labels, value in samples],
        }
        for expr, when, samples in expected
    ]
    case = {"interval": "30s", "input_series": inputs, "promql_expr_test": wanted}
    content = {"rule_files": [str(RULES / "*.rules.yml")], "evaluation_interval": "30s", "tests": [case]}
    (directory / "made.test.yml").write_text(yaml.safe_dump(content))
    promtool("test", "rules", str(directory / "made.test.yml"))


def training_of(instance, run, rank, forward, steps=300):
    """Yield the series of a rank that lives: in each sample so many steps, and seconds in their forwards."""
    labels = {"instance": instance, "run": run, "rank": rank}
    yield series("hookd_target_up", f"1x{len(forward)}", **labels)
    yield series("hookd_steps_total", f"0+{steps}x{len(forward)}", **labels)
    sums = " ".join(str(total) for total in itertools.accumulate(forward, initial=0))
    yield series("hookd_timing_phase_seconds_total", sums, phase="forward", **labels)
    yield series("hookd_timing_phase_seconds_total", f"0+9x{len(forward)}", phase="backward", **labels)


@needs_promtool
def test_of_fifty_jobs_of_one_script_the_one_that_was_killed_is_the_only_alert(tmp_path):
    inputs = [series("up", "1x60", job="hookd", instance=f"n{node}:9465") for node in range(5)]
    for number in range(50):
        instance, run = f"n{number % 5}:9465", f"train.py@{number:08x}"
        if number == 17:
            labels = {"instance": instance, "run": run, "rank": "0"}
            inputs += [
                series("hookd_target_up", "1x19 0 0 0 0 stale", **labels),
                series("hookd_target_state", "0x19 1 1 1 1 stale", state="lost", **labels),
                series("hookd_target_info", "_x20 1 1 1 1 stale", user="alice", reason="signal SIGKILL", **labels),
            ]
        else:
            inputs += training_of(instance, run, "0", [15] * 40, steps=10 * (number + 1))
    killed = '{alertname="HookdTargetLost", run="train.py@00000011", user="alice"}'
    check(
        tmp_path,
        inputs,
        ("count(run:hookd_step_seconds:rate2m)", "12m", [("{}", 49)]),
        ("count by (alertname, run, user) (ALERTS)", "9m", []),
        ("count by (alertname, run, user) (ALERTS)", "12m", [(killed, 1)]),
    )


@needs_promtool
def test_of_a_thousand_ranks_that_die_there_is_one_alert(tmp_path):
    inputs = []
    for rank in range(1000):
        labels = {"instance": f"n{rank // 8}:9465", "run": "llama", "rank": rank}
        reason = "signal SIGKILL" if rank == 700 else "exit 1"
        inputs += [
            series("up", "1x20", job="hookd", instance=labels["instance"]),
            series("hookd_target_state", "0x3 1 1 1 1 stale", state="lost", **labels),
            series("hookd_target_info", "_x4 1 1 1 1 stale", user="alice", reason=reason, **labels),
        ]
    unique = list({one["series"]: one for one in inputs}.values())
    lost = "instance_run_rank_reason_user:hookd_target_lost:last10m"
    worst = f'{lost}{{instance="n87:9465", run="llama", rank="700", user="alice", reason="signal SIGKILL"}}'
    check(
        tmp_path,
        unique,
        ("count by (alertname, run) (ALERTS)", "4m", [('{alertname="HookdTargetLost", run="llama"}', 1)]),
        (f"count({lost})", "4m", [("{}", 1000)]),
        (f"topk(1, {lost})", "4m", [(worst, 2)]),
    )


@needs_promtool
def test_ranks_that_are_late_in_turn_are_not_stragglers(tmp_path):
    inputs = [
        one
        for rank in range(9)
        for one in training_of("n0:9465", "llama", rank, [24 if step % 9 == rank else 9 for step in range(40)])
    ]
    late = "run_rank:hookd_straggler_seconds:rate2m"
    check(
        tmp_path,
        inputs,
        (f"min_over_time((max by (run) ({late}))[10m:30s]) > bool 0", "18m", [('{run="llama"}', 1)]),
        ('count(ALERTS{alertname="HookdStraggler"})', "18m", []),
    )


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
        watchers = [declared for watcher in (Hangs, Stragglers, Drift, Keeper) for declared in watcher.families]
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
