"""hookd names a fault planted at a known step in a known layer: the module where it began, its place, its step."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support import tool, training
from tests.support.processes import wait_until
from tests.support.tool import Attachment, Page, hookd
from tests.support.training import Job

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("workloads")]

AT = 6
PLANTED = [("grad-nan", "layers.3", "grad", "nan")]
MORE = [
    ("forward-nan", "layers.2.fc", "output", "nan"),
    ("weight-nan", "layers.1.norm", "param", "nan"),
    ("loss-nan", "layers.2.fc", "loss", "nan"),
    ("forward-nan", "layers.3", "output", "nan"),
    ("forward-inf", "layers.0.norm", "output", "inf"),
    ("forward-nan", "embed", "output", "nan"),
    ("forward-nan", "head", "output", "nan"),
    ("forward-inf", "layers.4.fc", "output", "inf"),
    ("grad-nan", "embed", "grad", "nan"),
    ("grad-nan", "head", "grad", "nan"),
    ("weight-nan", "embed", "param", "nan"),
    ("weight-nan", "head", "param", "nan"),
]
"""Outputs, parameters, the loss, and other layers, the first and the last included; tests/plugins has each kind in process."""


def found(page: Page) -> list[dict[str, Any]]:
    return [incident for incident in page.read().incidents if incident.get("where")]


@pytest.mark.parametrize(
    ("fault", "layer", "where", "kind"),
    [*PLANTED, *(pytest.param(*one, marks=pytest.mark.load) for one in MORE)],
)
def test_under_run_a_fault_is_named_with_its_module_place_and_exact_step(fault, layer, where, kind):
    job = Job("workloads/faults.py", f"--steps 12 --fault {fault} --layer {layer} --at {AT} --pause 0.05")
    # The budget may allow one look at the backward in 100 steps, and this fault happens in one step alone.
    budget = {"HOOKD_BUDGET": "1"} if where == "grad" else {}
    with tool.run("-p", "nan", program=job.command(), **budget) as process, Page.below(process) as page:
        incident = wait_until(lambda: found(page), what="an incident")[0]
        process.finish()
        module = "" if where == "loss" else layer
        assert (incident["module"], incident["where"], incident["kind"], incident["step"]) == (module, where, kind, AT)
        assert f"step {AT}" in incident["message"]
        assert layer in incident["message"] or not module
        assert len(found(page)) == 1, "the consequences of a fault are not findings of their own"
        values = page.values()
        assert values["hookd_nan_origin"] == {(module, where, kind): 1}
        assert values["hookd_nan_first_step"] == {(): AT}


SMALL = "--steps 40 --width 32 --length 32 --batch 4"
HEALTHY = [
    Job("workloads/charlm.py", f"{SMALL} --scaler"),
    Job("workloads/faults.py", "--steps 50 --fault none"),
    Job("workloads/charlm.py", SMALL),
    *(Job("workloads/charlm.py", f"{SMALL} {how}") for how in ("--amp", "--checkpoint nonreentrant", "--checkpoint reentrant")),
    Job("workloads/convnet.py", "--steps 20 --batch 8"),
]  # fmt: skip


@pytest.mark.load  # test_findings has a healthy job that is short
@pytest.mark.parametrize(
    "job",
    HEALTHY,
    ids=lambda job: job.arguments,
)
def test_in_a_healthy_job_nothing_is_found(job):
    """Neither the steps that a scaler skips because of an overflow nor a mask of infinity count as faults."""
    training.plain_run(job)
    observers = tool.plugin_options(["nan", "activations:every=1"])
    with tool.run(*observers, program=job.command("--pause", "0.02")) as process, Page.below(process) as page:
        assert training.result(process.finish()) == training.plain_result(job)
        assert page.read().incidents == []
        values = page.values()
        is_scaled = "--scaler" in job.arguments
        assert (values["hookd_nan_amp_skipped_steps"].get((), 0) > 0) == is_scaled
        assert is_scaled or sum(values["hookd_nan_nonfinite"].values()) == 0


@pytest.mark.parametrize(
    ("fault", "layer", "where"),
    [
        ("forward-nan", "layers.2.fc", "output"),
        pytest.param("loss-nan", "layers.2.fc", "loss", marks=pytest.mark.load),
    ],
)
def test_after_an_attach_the_report_says_from_which_step_it_counts(fault, layer, where, attachable):
    """The SGD of faults.py keeps no step count, so steps can only be counted from the attach."""
    job = Job("workloads/faults.py", f"--steps 0 --fault {fault} --layer {layer} --at 120 --pause 0.1")
    with training.start_warm(job) as process:
        process.expect("^step 3 ")
        with Attachment([process.pid], "-p", "nan:every=1") as attachment:
            metrics = wait_until(lambda: with_origin(attachment), what="the origin in the metrics")
            module = "" if where == "loss" else layer
            origin = metrics.select("hookd_nan_origin")[0].labels
            assert (origin["module"], origin["where"], origin["kind"]) == (module, where, "nan")
            page = Page.of(process.pid)
            assert page is not None
            with page:
                incident = wait_until(lambda: found(page), what="the incident")[0]
            assert 1 <= incident["step"] < 120 - 3, "counted from the attach"
            text = hookd("report", str(process.pid))
            assert re.search(r"counted from the attach|since the attach", text), text
            assert layer in text or not module
            attachment.detach()


def with_origin(attachment: Attachment) -> tool.Metrics | None:
    metrics = attachment.metrics()
    return metrics if metrics.select("hookd_nan_origin") else None


@pytest.mark.load
def test_after_an_attach_an_optimizer_that_counts_gives_the_absolute_step(attachable):
    """AdamW counts its steps, so hookd can report the same number as the script."""
    job = Job("workloads/charlm.py", "--steps 0 --width 32 --length 32 --pause 0.05")
    with training.start_warm(job) as process:
        process.expect("^step 9 ")
        with Attachment([process.pid], "-p", "timing") as attachment:
            wait_until(lambda: attachment.metrics().total("hookd_steps_total") >= 3, what="three steps")
            page = Page.of(process.pid)
            assert page is not None
            with page:
                before = int(process.out[-1].split()[1])
                offset = wait_until(lambda: page.reader.identity()["step_offset"], what="the absolute step")
                counted = page.values()["hookd_steps"][()]
            after = int(process.out[-1].split()[1])
            assert before - 1 <= counted + offset <= after + 1
            attachment.detach()
