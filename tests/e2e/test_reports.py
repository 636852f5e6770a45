"""Trainings from public reports, rewritten as small scripts; hookd's numbers are compared with their own.

Each runs once plainly, once under `hookd run`, whose numbers are compared with the script's own counts, and once
attached in the middle. Losses and the closing checksum are the same, bit for bit.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import tool, training
from tests.support.processes import wait_until
from tests.support.tool import Attachment, Page, plugin_options
from tests.support.training import Job

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("attachable")]

OBSERVERS = plugin_options(
    ["nan:every=1", "timing:every=2", "activations:every=1", "learning:every=1", "optimizer:every=1", "coverage"]
)
ALL = "1"
"""A budget of the whole step: all is looked at in every one."""
QUICK = ["by_hand", "inference", "rollouts", "validation"]
MORE = [
    "each_parameter", "two_optimizers", "sparse_beside_dense", "adversaries", "by_hand_data", "by_hand_functional", "transforms",
    "used_uncalled", "warm_up", "odd_names", "recursive", "deep", "teacher", "averaged", "closures", "compiled", "workers",
]  # fmt: skip
WITH_LIBRARIES = {
    "trainer": ("transformers", "accelerate"),
    "language": ("transformers", "accelerate"),
    "fitted": ("lightning",),
    "lora": ("peft",),
    "unet": ("diffusers",),
}
"""What they import; `make long` installs it."""
WITH_RANKS = {"replicated": (), "accelerated": ("accelerate",)}
"""What torchrun starts twice, and what else they import."""


UNREPORTED = {"by_hand_data": 1}
"""The last step of this script leaves no trace that it was made."""


def test_every_report_is_in_one_of_the_lists() -> None:
    scripts = {path.stem for path in (Path(__file__).parent / "reports").glob("[a-z]*.py")}
    assert sorted(scripts) == sorted([*QUICK, *MORE, *WITH_LIBRARIES, *WITH_RANKS])


@pytest.mark.parametrize("name", QUICK)
def test_numbers_are_those_of_the_script(name: str) -> None:
    under_run(name)


@pytest.mark.load
@pytest.mark.parametrize("name", MORE)
def test_numbers_are_those_of_more_scripts(name: str) -> None:
    under_run(name)


@pytest.mark.load
@pytest.mark.parametrize("name", WITH_LIBRARIES)
def test_numbers_are_those_of_scripts_with_libraries(name: str) -> None:
    for library in WITH_LIBRARIES[name]:
        pytest.importorskip(library)
    under_run(name)


def under_run(name: str) -> None:
    plain = training.plain_run(job := Job(f"reports/{name}.py", has_libraries=name in WITH_LIBRARIES))
    command = job.command("--pause", "0.01")
    with tool.run(*OBSERVERS, program=command, HOOKD_BUDGET=ALL) as process, Page.below(process) as page:
        lines = process.finish()
        found = page.values()
        incidents = [incident["message"] for incident in page.read().incidents]
        errors = {one: count for one, count in found["hookd_plugin_errors"].items() if count}
    assert training.result(lines) == plain.result()
    assert not errors, process.describe()
    (counted,) = counts(lines)
    compare(counted, found, counted["steps"] - UNREPORTED.get(name, 0), incidents)


@pytest.mark.load
@pytest.mark.parametrize("name", WITH_RANKS)
def test_numbers_are_those_of_each_rank(name: str) -> None:
    for library in WITH_RANKS[name]:
        pytest.importorskip(library)
    plain = training.plain_run(job := Job(f"reports/{name}.py", ranks=2, has_libraries=bool(WITH_RANKS[name])))
    with ExitStack() as stack:
        process = stack.enter_context(tool.run(*OBSERVERS, program=job.command("--pause", "0.02"), HOOKD_BUDGET=ALL))
        pages: dict[int, Page] = {}

        def are_found() -> bool:
            for pid in set(tool.family_of(process.pid)) - pages.keys():
                if (page := Page.of(pid)) is not None:
                    pages[pid] = stack.enter_context(page)
            return len(pages) == 2  # noqa: PLR2004

        wait_until(are_found, what="the pages of both ranks")
        lines = process.finish()
        by_rank = {page.read().identity["rank"]: page for page in pages.values()}
        assert training.result(lines) == plain.result()
        found = counts(lines)
        assert sorted(counted["rank"] for counted in found) == [0, 1]
        for counted in found:
            page = by_rank[counted["rank"]]
            assert page.read().incidents == []
            compare(counted, page.values(), counted["steps"], [])


def counts(lines: Sequence[str]) -> list[dict[str, Any]]:
    """Return what the scripts have counted themselves, one of each rank."""
    return [json.loads(line.partition(" ")[2]) for line in lines if line.startswith("counted ")]


def compare(counted: dict[str, Any], found: dict[str, Any], reported: int, incidents: Sequence[str]) -> None:
    """Compare what a script has counted with the numbers on its page, for so many reported steps."""
    assert found["hookd_steps"][()] == reported
    assert "incident" not in counted or any(counted["incident"] in message for message in incidents), incidents
    if "modules" in counted:
        assert {name for (name,) in found["hookd_timing_forward_calls"]} == set(counted["modules"])
    for kind, of in (("forward", "calls_of"), ("inference", "inferred")):
        for module, calls in counted.get(of, {}).items():
            assert found[f"hookd_timing_{kind}_calls"][(module,)] == calls, (kind, module)
    if "micro_batches" in counted:
        assert found["hookd_micro_batches"][()] == counted["micro_batches"] * reported
    if "calls" in counted:
        assert counted["calls"] - 1 <= found["hookd_step_calls"][()] <= counted["calls"]
    if "samples" in counted:
        assert found["hookd_timing_samples"][()] == counted["samples"] / counted["steps"] * reported
    if "loss" in counted:
        assert found["hookd_activations_loss"][("0",)] == pytest.approx(counted["loss"], rel=1e-6)
    for module, norms in counted.get("norms", {}).items():
        seen = [found[f"hookd_activations_{of}_norm"][(module,)] for of in ("grad", "weight")]
        assert seen == pytest.approx(norms, rel=1e-5), module


@pytest.mark.load
@pytest.mark.parametrize("name", QUICK + MORE)
def test_an_attach_and_a_detach_in_the_middle_change_nothing(name: str) -> None:
    plain = training.plain_run(job := Job(f"reports/{name}.py"))
    unit = "hookd_step_calls_total" if name == "inference" else "hookd_steps_total"
    with training.start_warm(job, "--pause", "0.2") as process:
        process.expect("^step 5 ")
        with Attachment([process.pid], *OBSERVERS) as attachment:
            wait_until(lambda: attachment.metrics().total(unit) >= 8, what=unit)
            assert attachment.metrics().total("hookd_plugin_errors_total") == 0, attachment.process.describe()
            attachment.detach()
        assert training.result(process.finish()) == plain.result()
