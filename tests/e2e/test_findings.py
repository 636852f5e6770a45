"""Every fault is found and named by the plugin whose matter it is, and where nothing is wrong nothing is reported.

`tests/targets/faulty.py` plants faults in a net of ours, the shared `faults.py` in its own; the healthy runs are of all
workloads. All observers are on, at their defaults in the healthy runs: what an operator leaves on must be quiet.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support import tool
from tests.support.tool import Page, plugin_options
from tests.support.training import Job

pytestmark = [pytest.mark.e2e]

OBSERVERS = ("nan", "timing", "activations", "learning", "memory", "optimizer", "coverage")
CLOSE = (
    "nan:every=1",
    "timing",
    "activations:every=1",
    "learning:every=1",
    "memory:every=2,kept=8",
    "optimizer",
    "coverage",
)
AT, STEPS, LONG_STEPS = 40, 110, 2000
LONG_S = 3600
FOUND = {
    "forward-nan": ("nan", "nan"),
    "grad-nan": ("nan", "nan"),
    "weight-nan": ("nan", "nan"),
    "loss-nan": ("nan", "nan"),
    "dead-relu": ("activations", "dead"),
    "vanishing": ("activations", "vanishing"),
    "exploding": ("activations", "exploding"),
    "leak": ("memory", "leak"),
}
"""Which plugin finds a fault, and by what kind of incident; forward-inf is shared faults.py's alone."""
NAMED = {"dead-relu": r"layers\.\d\.act", "vanishing": r"layers\.\d\.norm"}
"""The modules of the shared faults.py that the findings on learning must name."""
SMALL = "--width 32 --batch 4 --length 32"
HEALTHY = [
    Job("workloads/charlm.py", SMALL),
    Job("workloads/charlm.py", f"{SMALL} --amp"),
    Job("workloads/charlm.py", f"{SMALL} --scaler"),
    Job("workloads/charlm.py", f"{SMALL} --checkpoint nonreentrant --accumulate 2"),
    Job("workloads/convnet.py", "--batch 8"),
    Job("workloads/faults.py", "--fault none"),
    Job("workloads/loader.py", "--start fork --ema"),
]
OURS = [Job("faulty.py"), Job("transformer.py"), Job("convnet.py"), Job("amp.py"), Job("checkpointed.py")]


def incidents(job: Job, observers: tuple[str, ...], finish_s: float = 200) -> list[dict[str, Any]]:
    """Run a job to its end; return all incidents, after checking that no plugin has failed."""
    with tool.run(*plugin_options(observers), program=job.command()) as process, Page.below(process) as page:
        process.finish(finish_s)
        values = page.values()
        assert set(values["hookd_plugin_errors"].values()) == {0}, [entry["message"] for entry in page.read().logs]
        assert {state for (_, state), on in values["hookd_plugin_state"].items() if on} == {"active"}
        return page.read().incidents


def of(script: str, fault: str) -> Job:
    return Job(script, f"--steps {STEPS} --fault {fault} --at {AT} --pause 0.01")


def assert_found(reported: list[dict[str, Any]], plugin: str, kind: str) -> None:
    found = [one for one in reported if (one["plugin"], one["kind"]) == (plugin, kind)]
    assert found, [(one["plugin"], one["kind"], one["message"]) for one in reported]
    assert min(one["step"] for one in found) >= AT
    assert [one for one in reported if one["step"] < AT] == [], "reported before anything was wrong"


@pytest.mark.load  # the leak is in a test of its own
@pytest.mark.parametrize("fault", FOUND)
def test_a_fault_of_ours_is_found_and_named(fault):
    assert_found(incidents(of("faulty.py", fault), CLOSE), *FOUND[fault])


@pytest.mark.load
@pytest.mark.parametrize("fault", [*FOUND, "forward-inf"])
def test_a_shared_fault_is_found_and_named(fault, workloads):
    reported = incidents(of("workloads/faults.py", fault), CLOSE)
    plugin, kind = FOUND.get(fault, ("nan", "inf"))
    assert_found(reported, plugin, kind)
    modules = [one["module"] for one in reported if one["kind"] == kind and fault in NAMED]
    assert all(re.fullmatch(NAMED[fault], module) for module in modules), modules


def test_a_leak_is_named_by_the_module_whose_output_is_kept():
    reported = incidents(of("faulty.py", "leak"), CLOSE)
    assert_found(reported, *FOUND["leak"])
    (leak,) = [one for one in reported if one["kind"] == "leak"]
    assert leak["modules"] == ["(root)"]
    assert AT <= leak["since_step"] <= AT + 2
    assert "(root)" in leak["message"]


@pytest.mark.parametrize(
    "job", [Job("faulty.py"), pytest.param(Job("checkpointed.py"), marks=pytest.mark.load)], ids=str
)
def test_a_healthy_job_of_ours_is_quiet(job):
    assert incidents(Job(job.script, f"--steps 100 --pause 0.005 {job.arguments}"), OBSERVERS) == []


@pytest.mark.load
@pytest.mark.timeout(LONG_S)
@pytest.mark.parametrize("job", [*HEALTHY, *OURS], ids=str)
def test_a_healthy_job_is_quiet_for_2000_steps(job, workloads):
    job = Job(job.script, f"--steps {LONG_STEPS} {job.arguments}")
    assert incidents(job, OBSERVERS, LONG_S) == []
