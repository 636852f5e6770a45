"""Whatever a plugin does, training goes on to the same weights, and the plugin is counted and disabled."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import tool, training
from tests.support.processes import wait_until
from tests.support.tool import Attachment, Page, has_page
from tests.support.training import Job

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.e2e]

PLUGIN_DIR = Path(__file__).parent / "plugins"
JOB = Job("mlp.py", "--steps 40")
TRANSFORMER = Job("transformer.py", "--steps 25")


@contextlib.contextmanager
def observed(job: Job, *plugins: str) -> Iterator[Page]:
    """Run a job under hookd with plugins, compare it with the plain run, and yield its last page."""
    options = [*tool.plugin_options(plugins), "--plugin-dir", PLUGIN_DIR]
    training.plain_run(job)
    with tool.run(*options, program=job.command("--pause", "0.02")) as process, Page.below(process) as page:
        assert training.result(process.finish()) == training.plain_result(job), process.describe()
        assert not [line for line in process.err if "Traceback" in line], process.describe()
        yield page


def states(page: Page, plugin: str) -> set[str]:
    return {state for (name, state), on in page.values()["hookd_plugin_state"].items() if name == plugin and on}


IN_ERROR = ("raises", "exits", "recurses", "returns")
"""Acts that are in error at every event."""


def test_plugins_in_error_are_quarantined_and_counted_together_and_harm_nothing():
    """The tests below, which only `make long` runs, look at each plugin alone."""
    with observed(
        TRANSFORMER, *IN_ERROR, "calls", "select_raises", "leave_raises", "leaks", "everything:every=1"
    ) as page:
        values = page.values()
        errors = values["hookd_plugin_errors"]
        for plugin in IN_ERROR:
            assert errors[(plugin,)] >= 3
            assert states(page, plugin) == {"quarantined"}
            assert 1 <= len([entry for entry in page.read().logs if plugin in entry["message"]]) <= 12
        assert errors[("select_raises",)] >= 1
        assert not errors.get(("everything",))
        assert not errors.get(("calls",))
        assert values["hookd_everything_events"][("step_post",)] >= 20
        assert values["hookd_calls_calls"][()] > 100


@pytest.mark.load
@pytest.mark.parametrize(
    ("plugin", "job"), [("raises", TRANSFORMER), ("exits", JOB), ("recurses", JOB), ("returns", TRANSFORMER)], ids=str
)
def test_a_plugin_in_error_at_every_event_is_quarantined_counted_and_harmless(plugin, job):
    with observed(job, plugin, "everything:every=1") as page:
        values = page.values()
        assert values["hookd_plugin_errors"][(plugin,)] >= 3
        assert states(page, plugin) == {"quarantined"}
        assert values["hookd_plugin_errors"].get(("everything",), 0) == 0
        assert values["hookd_everything_events"][("step_post",)] >= 20, "the others go on"
        logged = [entry for entry in page.read().logs if plugin in entry["message"]]
        assert 1 <= len(logged) <= 12, "logged, but not at every event"


@pytest.mark.load
def test_a_plugin_that_calls_modules_itself_is_not_observed_by_itself():
    with observed(TRANSFORMER, "calls", "everything:every=1") as page:
        values = page.values()
        assert values["hookd_calls_calls"][()] > 100
        assert values["hookd_plugin_errors"].get(("calls",), 0) == 0
        modules = {entry.name for entry in page.read().modules.values()}
        assert not [name for name in modules if name.startswith("#3")], "its modules are not a model of the job"


@pytest.mark.load
def test_a_plugin_that_sleeps_is_charged_for_it():
    with observed(JOB, "sleeps", "everything") as page:
        spent = page.values()["hookd_overhead_seconds"]
        assert spent[("sleeps",)] > 0.1
        assert spent[("sleeps",)] > 3 * spent[("everything",)]


@pytest.mark.load
def test_a_plugin_that_leaves_torchs_modes_changed_changes_nothing():
    with observed(JOB, "leaks") as page:
        assert page.values()["hookd_steps"][()] >= 39


@pytest.mark.load
@pytest.mark.parametrize("plugin", ["select_raises", "leave_raises"])
def test_a_plugin_in_error_beside_the_events_is_counted(plugin):
    with observed(JOB, plugin, "everything:every=1") as page:
        assert page.values()["hookd_everything_events"][("step_post",)] >= 30
        if plugin == "select_raises":
            assert page.values()["hookd_plugin_errors"][(plugin,)] >= 1


def test_a_plugin_that_cannot_be_configured_is_refused_with_its_reason(attachable):
    with training.start_warm(Job("mlp.py", "--steps 0 --pause 0.01")) as process:
        process.expect("^step 3 ")
        options = ["--listen", "127.0.0.1:0", "-p", "configure_raises", "--plugin-dir", str(PLUGIN_DIR)]
        with tool.start_hookd("attach", str(process.pid), *options) as attach:
            assert attach.wait() == 2, attach.describe()
            assert "no way to begin" in "\n".join(attach.err)
        assert not has_page(process.pid), "nothing is left of an attach that was refused"
        step = int(process.out[-1].split()[1])
        process.expect(f"^step {step + 5} ")


def test_hostile_plugins_can_be_attached_and_detached(attachable, tmp_path):
    names = ("raises", "exits", "recurses", "returns", "calls", "select_raises", "leave_raises", "everything")
    plugins = [*tool.plugin_options(names), "--plugin-dir", PLUGIN_DIR, "--force"]
    job, hurry = Job("transformer.py", "--steps 160"), tmp_path / "hurry"
    with training.start_warm(job, "--pause", "0.15", "--hurry", str(hurry)) as process:
        process.expect("^step 5 ")
        with Attachment([process.pid], *plugins) as attachment:
            wait_until(lambda: attachment.metrics().total("hookd_steps_total") >= 5, what="five steps")
            quarantined = attachment.metrics().select("hookd_plugin_state", state="quarantined")
            assert {s.labels["plugin"] for s in quarantined if s.value} >= {"raises", "exits", "recurses", "returns"}
            attachment.detach()
        hurry.touch()
        assert training.result(process.finish()) == training.plain_result(job)
