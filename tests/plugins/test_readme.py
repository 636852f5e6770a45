"""The tables of plugins/README.md have every metric and every option of the plugins that come with hookd, and no other."""

from __future__ import annotations

import pytest

from tests.support.documents import generator
from tests.support.environment import REPOSITORY

GENERATOR = generator()
DIRECTORY = REPOSITORY / "plugins"
PLUGINS = sorted(package.name[len("hookd_") :] for package in DIRECTORY.glob("hookd_*"))


def loaded(hook, plugin):
    hook.start(plugin, **GENERATOR.EVERYTHING.get(plugin, {}))
    return hook.context(plugin)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_metrics_are_those_of_the_plugin(hook, plugin):
    declared = {
        (metric.name + "_total" * (metric.kind == "counter"), metric.kind, ", ".join(metric.label_names))
        for metric in loaded(hook, plugin).metrics
    }
    reported = [(name, kind, labels) for name, kind, labels, *_ in GENERATOR.rows(plugin) if name.startswith("hookd_")]
    assert sorted(reported) == sorted(declared)


@pytest.mark.parametrize(
    ("options", "shown"), [({}, "1..10"), ({"every": "1"}, 1), ({"every": "3"}, 3)], ids=["default", "1", "3"]
)
def test_an_interval_that_adapts_is_shown_with_both_ends_and_a_fixed_one_as_it_is(hook, options, shown):
    hook.start("nan", **options)
    assert hook.context("nan").settings["every"] == shown


@pytest.mark.parametrize("plugin", PLUGINS)
def test_options_are_those_of_the_plugin(hook, plugin):
    known = {*loaded(hook, plugin).settings, "every"} - (
        {"every"} if plugin == "gradclip" else set()
    )  # it refuses that
    reported = [name for name, *_ in GENERATOR.rows(plugin) if not name.startswith("hookd_")]
    assert sorted(reported) == sorted(known)
