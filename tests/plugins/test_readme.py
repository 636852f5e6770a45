"""The tables of plugins/README.md have every metric and every option of the plugins that come with hookd, and no other."""

from __future__ import annotations

import re

import pytest

from tests.support.environment import REPOSITORY

DIRECTORY = REPOSITORY / "plugins"
README = (DIRECTORY / "README.md").read_text()
PLUGINS = sorted(package.name[len("hookd_") :] for package in DIRECTORY.glob("hookd_*"))
EVERYTHING = {"activations": {"parameters": "true", "histogram": "true"}}
"""Options with which a plugin declares all of its metrics."""


def rows(plugin):
    """Give the cells of all rows in the section of a plugin."""
    (section,) = re.findall(rf"^## {plugin}\n(.*?)^## ", README, re.MULTILINE | re.DOTALL)
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip(" `") for cell in line] for line in lines]


def loaded(hook, plugin):
    hook.start(plugin, **EVERYTHING.get(plugin, {}))
    return hook.context(plugin)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_metrics_are_those_of_the_plugin(hook, plugin):
    declared = {
        (metric.name + "_total" * (metric.kind == "counter"), metric.kind, ", ".join(metric.label_names))
        for metric in loaded(hook, plugin).metrics
    }
    told = [(name, kind, labels) for name, kind, labels, *_ in rows(plugin) if name.startswith("hookd_")]
    assert sorted(told) == sorted(declared)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_options_are_those_of_the_plugin(hook, plugin):
    known = {*loaded(hook, plugin).settings, "every"} - (
        {"every"} if plugin == "gradclip" else set()
    )  # it refuses that
    told = [name for name, *_ in rows(plugin) if not name.startswith("hookd_")]
    assert sorted(told) == sorted(known)
