"""All examples at once, three in a real training and two in its daemon, do not change the training."""

from __future__ import annotations

import json
import os
import statistics

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support import training
from tests.support.daemon import Daemon
from tests.support.environment import REPOSITORY
from tests.support.posted import Server
from tests.support.training import Job

pytestmark = [pytest.mark.usefixtures("attachable"), pytest.mark.load]

MIXTURE = Job("mixture.py", "--steps 260")
PLUGINS = ["entropy", "experts:modules=gate,top=2", "noise:batch=8"]
WINDOW_STEPS = 16
"""Of the governor: it publishes `hookd_overhead_ratio` once in each window."""
SETTLED_STEPS = 96
"""By then every plugin has been called for the first time, entropy after 50 steps: torch sets up much then, once."""
STEPS = 256
CONFIG = """
[eval]
allow = true
[daemon_plugins.tensorboard]
dir = "{folder}/curves"
every_s = "0.5"
[otlp]
endpoint = "{url}"
interval_s = 1
[daemon_plugins.slack]
url = "{url}/slack"
kinds = "eval"
"""


IN_DAEMON = ("slack", "tensorboard")


class Watched:
    """The metrics that a daemon serves of one training, and its overhead by windows."""

    def __init__(self, daemon):
        self.daemon = daemon
        self.windows = []

    def look(self):
        self.metrics = self.daemon.metrics()
        taken, ratio = (self.metrics.total(name) for name in ("hookd_steps_total", "hookd_overhead_ratio"))
        if not self.windows or ratio != self.windows[-1][1]:
            self.windows.append((taken, ratio))


def test_all_at_once_leave_the_training_as_it_is_and_keep_to_the_budget(stack, tmp_path):
    server = stack.enter_context(Server())
    (tmp_path / "hookd.toml").write_text(CONFIG.format(folder=tmp_path, url=server.url))
    examples = REPOSITORY / "examples" / "plugins"
    daemon = Daemon(tmp_path, "--config", tmp_path / "hookd.toml", "--plugin-dir", examples)
    stack.callback(daemon.process.close)
    pace = ("--pause", "0.02")  # on a quick machine an attach takes a hundred steps of this small model
    process = stack.enter_context(training.start_warm(MIXTURE, *pace, HOOKD_RUN=f"examples-{os.getpid()}"))
    process.expect("^step 3 ")
    daemon.client.attach(process.pid, timeout_s=60, plugins=PLUGINS)

    watched = Watched(daemon)
    daemon.client.evaluate(process.pid, "step", 10.0)
    for step in range(
        WINDOW_STEPS, STEPS, WINDOW_STEPS // 2
    ):  # the training's own lines are the clock: no busy polling
        process.expect(f"^step {step} ")
        watched.look()
    metrics = watched.metrics
    assert metrics.labels("hookd_entropy_ratio", "head") == {"0", "1", "2", "3"}
    assert metrics.labels("hookd_experts_load_ratio", "expert") == {"0", "1", "2", "3"}
    assert metrics.select("hookd_noise_scale_samples")[0].value != 0
    for plugin in ("entropy", "experts", "noise"):
        assert metrics.total("hookd_plugin_state", plugin=plugin, state="active") == 1
        assert metrics.total("hookd_plugin_errors_total", plugin=plugin) == 0
    budget = metrics.total("hookd_overhead_budget_ratio")
    settled = [ratio for steps, ratio in watched.windows if steps >= SETTLED_STEPS]
    assert len(settled) >= (STEPS - SETTLED_STEPS) / WINDOW_STEPS / 2, watched.windows
    assert 0 < statistics.median(settled) <= budget == 0.01, watched.windows

    plain = training.plain_run(MIXTURE)
    assert training.result(process.finish()) == plain.result()

    (reported,) = [json.loads(body)["text"] for path, _, body in server.posts if path == "/slack"]
    assert reported.startswith("eval in examples-")
    exported = [ExportMetricsServiceRequest.FromString(body) for path, _, body in server.posts if path == "/v1/metrics"]
    names = {
        m.name for one in exported for it in one.resource_metrics for scope in it.scope_metrics for m in scope.metrics
    }
    assert {"hookd_noise_scale_samples", "hookd_entropy_ratio", "hookd_experts_load_ratio"} <= names
    (folder,) = (tmp_path / "curves").iterdir()
    curves = EventAccumulator(str(folder)).Reload()
    assert curves.Tensors("hookd_noise_scale_samples")[-1].step > SETTLED_STEPS
    for plugin in IN_DAEMON:
        assert daemon.metrics().total("hookd_daemon_plugin_state", plugin=plugin, state="active") == 1
        assert daemon.metrics().total("hookd_daemon_plugin_errors_total", plugin=plugin) == 0
