"""Odd trainings are the same to the bit under `hookd run`, while attached, and after a detach. In process: test_do_no_harm."""

from __future__ import annotations

import pytest

from tests.support import tool, training
from tests.support.environment import TARGETS, bare_python
from tests.support.processes import Process
from tests.support.tool import Attachment, Page, plugin_options

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

OBSERVERS = plugin_options(
    [
        "nan:every=1",
        "timing:every=1",
        "activations:every=1",
        "memory",
        "optimizer",
        "coverage",
        "drift:every=1,replicated=all",
    ]
)
PROGRAM = (bare_python(), TARGETS / "odd.py")


def trained(process: Process, word: str) -> dict[str, str]:
    """Make the program train each case once; return the digests by name."""
    before = len(process.out)
    process.ask(word, f"^{word} done$", timeout_s=240)
    rows = [line.split() for line in process.out[before:] if line.startswith(f"{word} ")]
    return {name: digest for _, name, *digests in rows for digest in digests}


@pytest.fixture(scope="module")
def plain():
    with Process(PROGRAM, env=training.environment(), stdin=True) as process:
        process.expect("^ready$")
        first, second = trained(process, "first"), trained(process, "second")
        assert len(first) > 30
        assert first == second, "they differ without hookd"
        return first


@pytest.mark.load
def test_odd_trainings_are_the_same_under_run(plain):
    with tool.run(*OBSERVERS, program=PROGRAM, stdin=True, HOOKD_BUDGET="1") as process:
        process.expect("^ready$")
        with Page.below(process) as page:
            assert trained(process, "observed") == plain
            values = page.values()
            assert values["hookd_steps"][()] > len(plain), "it did not look"
            assert set(values["hookd_plugin_errors"].values()) == {0}, [entry["message"] for entry in page.read().logs]


@pytest.mark.load
@pytest.mark.usefixtures("attachable")
def test_odd_trainings_are_the_same_while_attached_and_afterwards(plain):
    with Process(PROGRAM, env=training.environment(), stdin=True) as process:
        process.expect("^ready$")
        with Attachment([process.pid], *OBSERVERS, HOOKD_BUDGET="1") as attachment:
            assert trained(process, "observed") == plain
            assert attachment.metrics().total("hookd_steps_total") > len(plain)
            assert attachment.metrics().total("hookd_plugin_errors_total") == 0
            attachment.detach()
        assert trained(process, "afterwards") == plain
