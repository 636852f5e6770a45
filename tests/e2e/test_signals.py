"""An exception that a signal handler of the training raises belongs to the training, whosever frames it interrupts."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support import tool, training
from tests.support.processes import Process, wait_until
from tests.support.training import Job

pytestmark = [pytest.mark.e2e]

SIGNALS = 500
OBSERVERS = ("nan:every=1", "timing", "activations:every=1", "everything:every=1")
PLUGINS = [*tool.plugin_options(OBSERVERS), "--plugin-dir", Path(__file__).parent / "plugins"]
NUMBERS = {"custom": signal.SIGTERM, "exit": signal.SIGTERM, "interrupt": signal.SIGINT}


def send_all(process: Process, pid: int, number: int) -> dict[str, int]:
    """Send the signals, each after the loop has answered the one before; return the loop's own count."""
    for count in range(1, SIGNALS + 1):
        os.kill(pid, number)
        answer = process.expect(rf"^(caught|lost) {count}$", after=max(0, len(process.out) - 3))
        assert answer.group(1) == "caught", f"signal {count} never reached the training code: {process.describe()}"
    os.kill(pid, signal.SIGUSR1)
    process.finish()
    unexpected = [line for line in process.err if line.startswith("unexpected")]
    assert not unexpected, "the training code got an error that it would not have had without us"
    words = process.out[-1].split()
    return dict(zip(words[2::2], map(int, words[3::2]), strict=True))


@pytest.mark.parametrize(
    "kind", ["custom", *(pytest.param(kind, marks=pytest.mark.load) for kind in ("exit", "interrupt"))]
)
def test_every_signal_reaches_the_training_code_plainly(kind):
    with training.start_warm(Job("preempted.py", f"--kind {kind}")) as process:
        process.expect("^ready$")
        counts = send_all(process, process.pid, NUMBERS[kind])
    assert counts == {"raised": SIGNALS, "caught": SIGNALS, "unexpected": 0}


@pytest.mark.parametrize(
    "kind", ["interrupt", *(pytest.param(kind, marks=pytest.mark.load) for kind in ("exit", "custom"))]
)
def test_every_signal_reaches_the_training_code_under_observation(kind, attachable):
    with training.start_warm(Job("preempted.py", f"--kind {kind}")) as process:
        process.expect("^ready$")
        with tool.Attachment([process.pid], *PLUGINS) as attachment:
            wait_until(lambda: attachment.metrics().total("hookd_steps_total") > 0, what="an observed step")
            counts = send_all(process, process.pid, NUMBERS[kind])
    assert counts == {"raised": SIGNALS, "caught": SIGNALS, "unexpected": 0}
