"""The examples that run in the daemon: real pages, the daemon's own host of plugins, and whoever they write or send to."""

from __future__ import annotations

import json
import sys

import pytest

from hookd.config import ServeConfig
from hookd.daemon import host
from tests.support.environment import REPOSITORY
from tests.support.pages import Ranks
from tests.support.posted import Server
from tests.support.processes import wait_until

EXAMPLES = REPOSITORY / "examples" / "plugins"
HOSTILE = "../../<!channel>\n"


class Scene:
    """One example in the daemon's own host; `look` is what the daemon does about once a second."""

    def __init__(self, stack, name, **options):
        config = ServeConfig(
            plugin_dirs=(EXAMPLES,), plugins_allow=(name,), daemon_plugin_options={name: options}
        )  # fmt: skip
        self.host = host.load(config)
        (self.one,) = self.host.hosted
        stack.callback(self.close)
        wait_until(lambda: self.one.state != "starting", what="its import")
        self.ranks = Ranks(stack, 1, run=HOSTILE)

    def look(self):
        for target in self.ranks.targets:
            target.poll()
        self.host.look(self.ranks.targets)
        wait_until(lambda: self.one.is_idle, what="its calls")
        assert not self.one.errors, self.one.trouble

    def value(self, name):
        found = {
            sample.name: sample.value for family in self.host.families(lambda *_: True) for sample in family.samples
        }
        return found[name]

    def close(self):
        self.host.close()
        self.one._thread.join(10)
        assert not self.one._thread.is_alive()
        sys.modules.pop(f"hookd_{self.one.name}", None)


def test_tensorboard_reads_curves_of_gauges_and_counters_over_steps(stack, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util

    scene = Scene(stack, "tensorboard", dir=str(tmp_path / "curves"), metrics="hookd_mine_*|hookd_steps", every_s="0")
    for step in range(1, 4):
        scene.ranks.add(0, "hookd_steps", 1)
        scene.ranks.set(0, "hookd_mine_loss", step / 2, module="a/b")
        scene.ranks.set(0, "hookd_other", 1.0)
        scene.look()
        scene.look()  # no step was taken: no point
    scene.look()
    assert scene.value("hookd_tensorboard_points_total") == 6
    scene.ranks.targets[0].detach()
    scene.look()
    (folder,) = (tmp_path / "curves").iterdir()
    assert folder.name == ".._..___channel__-rank0"
    read = EventAccumulator(str(folder)).Reload()
    curves = {
        tag: [(event.step, float(tensor_util.make_ndarray(event.tensor_proto))) for event in read.Tensors(tag)]
        for tag in read.Tags()["tensors"]
    }
    assert curves == {
        "hookd_mine_loss/a/b": [(1, 0.5), (2, 1.0), (3, 1.5)],
        "hookd_steps": [(1, 1.0), (2, 2.0), (3, 3.0)],
    }


def test_a_collector_gets_gauges_and_sums_of_those_that_live(stack):
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    server = stack.enter_context(Server())
    scene = Scene(stack, "otel", endpoint=f"{server.url}/v1/metrics", every_s="600")
    scene.ranks.add(0, "hookd_steps", 7)
    scene.ranks.set(0, "hookd_mine_loss", 2.5, module="a")
    scene.look()
    scene.look()
    assert scene.value("hookd_otel_instruments") >= 2
    provider = scene.one.hooks["close"][0].__self__.provider

    def exported():
        server.posts.clear()
        assert provider.force_flush(10_000)
        if not server.posts:
            return {}
        ((path, headers, body),) = server.posts
        assert (path, headers["Content-Type"]) == ("/v1/metrics", "application/x-protobuf")
        (resource,) = ExportMetricsServiceRequest.FromString(body).resource_metrics
        assert any(
            one.key == "service.name" and one.value.string_value == "hookd" for one in resource.resource.attributes
        )
        return {metric.name: metric for scope in resource.scope_metrics for metric in scope.metrics}

    found = exported()
    assert found["hookd_steps"].sum.is_monotonic
    (steps,) = found["hookd_steps"].sum.data_points
    (loss,) = found["hookd_mine_loss"].gauge.data_points
    assert (steps.as_double, loss.as_double) == (7.0, 2.5)
    attributes = {one.key: one.value.string_value for one in loss.attributes}
    assert attributes == {"module": "a", "run": HOSTILE, "rank": "0"}
    scene.ranks.targets[0].detach()
    scene.look()
    assert "hookd_mine_loss" not in exported()


def incident(kind="nan", message="the loss is <!channel>\nNaN", run="llama"):
    return {"id": 1, "kind": kind, "run": run, "rank": "3", "message": message}


def test_slack_is_told_once_and_how_many_more_there_were(stack):
    server = stack.enter_context(Server())
    scene = Scene(stack, "slack", url=server.url, kinds="nan|hang")
    plugin = scene.one.hooks["incident"][0].__self__
    for one in (incident(), incident(), incident(kind="lost"), incident(run="other"), incident()):
        scene.one.call("incident", incident=one)
    plugin.quiet_s = 0.0
    scene.one.call("incident", incident=incident(message="x" * 10_000))
    texts = [json.loads(body)["text"] for _, _, body in server.posts]
    assert texts[0] == "nan in llama/3: the loss is &lt;!channel&gt; NaN"
    assert texts[1].startswith("nan in other/3")
    assert texts[2].endswith("x (and 2 more before)")
    assert len(texts) == 3
    assert len(texts[2]) < 600
    scene.look()
    assert scene.value("hookd_slack_posts_total") == 3


def test_what_is_not_taken_is_an_error_and_the_next_one_is_posted(stack):
    server = stack.enter_context(Server())
    scene = Scene(stack, "slack", url=server.url)
    scene.one.hooks["incident"][0].__self__.address.timeout_s = 0.2
    server.answers[:] = [500, 302, "hang"]
    for _ in range(4):
        scene.one.call("incident", incident=incident())
    assert (scene.one.state, scene.one.errors["incident"]) == ("active", 3)
    assert "timed out" in scene.one.trouble["text"]
    assert len(server.posts) == 4


@pytest.mark.parametrize("options", [{}, {"url": "file:///etc/passwd"}])
def test_an_address_that_is_none_is_refused(stack, options):
    scene = Scene(stack, "slack", **options)
    assert scene.one.state == "refused"
    assert "it needs an address" in scene.one.trouble["text"]


def test_without_a_directory_tensorboard_is_refused(stack):
    scene = Scene(stack, "tensorboard")
    assert scene.one.state == "refused"
    assert "it needs a directory" in scene.one.trouble["text"]
