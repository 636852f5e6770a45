"""The metrics that a collector of OpenTelemetry gets, read by OpenTelemetry's own protobuf classes."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from hookd.errors import UsageError
from hookd.tool import config
from hookd.tool.daemon.metrics.collector import AttachCounter, FleetCollector
from hookd.tool.daemon.metrics.otlp import OtlpSender
from hookd.tool.daemon.metrics.selection import Limits
from hookd.tool.daemon.service import Service
from tests.support.pages import Ranks
from tests.support.posted import Server
from tests.support.processes import wait_until

BEGAN, NOW = 1_700_000_000_000_000_000, 1_700_000_060_000_000_000


@pytest.fixture
def server(stack):
    return stack.enter_context(Server())


@pytest.fixture
def ranks(stack):
    return Ranks(stack, 1)


@pytest.fixture
def sender(stack, server, ranks):
    times = iter([BEGAN, *[NOW] * 10])
    fleet = type("Fleet", (), {"targets": lambda _: ranks.targets})()
    collector = FleetCollector(fleet, AttachCounter(), Limits())
    sender = OtlpSender(collector, f"{server.url}/v1/metrics", lambda: next(times))
    stack.callback(sender.close)
    return sender


def received(server):
    """Return the resource of the last export, and its metrics by name."""
    path, headers, body = server.posts[-1]
    assert (path, headers["Content-Type"]) == ("/v1/metrics", "application/x-protobuf")
    (resource,) = ExportMetricsServiceRequest.FromString(body).resource_metrics
    attributes = {one.key: one.value.string_value for one in resource.resource.attributes}
    return attributes, {metric.name: metric for scope in resource.scope_metrics for metric in scope.metrics}


def labels(point):
    return {one.key: one.value.string_value for one in point.attributes}


def test_counters_gauges_and_histograms_arrive_with_their_labels_times_and_units(server, ranks, sender):
    ranks.add(0, "hookd_steps", 7)
    ranks.set(0, "hookd_mine_held_bytes", 2.5, module="a")
    page = ranks.pages[0]
    family = page.family("hookd_step_seconds", "histogram", "Help.", (), (0.1, 1.0))
    at = page.series(family, ())
    for offset, value in enumerate((3.0, 2.0, 1.0, 4.5)):  # of each bucket, and the sum
        page.cells[at + offset] = value
    assert sender.send()
    attributes, found = received(server)
    assert attributes["service.name"] == "hookd"

    assert found["hookd_steps"].sum.is_monotonic
    assert found["hookd_steps"].sum.aggregation_temporality == 2  # cumulative
    (steps,) = found["hookd_steps"].sum.data_points
    assert (steps.as_double, steps.start_time_unix_nano, steps.time_unix_nano) == (7.0, BEGAN, NOW)
    assert labels(steps) == {"run": "train.py", "rank": "0"}
    (held,) = found["hookd_mine_held_bytes"].gauge.data_points
    assert (held.as_double, labels(held)["module"], found["hookd_mine_held_bytes"].unit) == (2.5, "a", "By")
    (seconds,) = found["hookd_step_seconds"].histogram.data_points
    assert (list(seconds.explicit_bounds), list(seconds.bucket_counts)) == ([0.1, 1.0], [3, 2, 1])
    assert (seconds.count, seconds.sum, found["hookd_step_seconds"].unit) == (6, 4.5, "s")
    assert not seconds.HasField("min")
    assert "hookd_build_info" in found


def test_a_collector_that_does_not_answer_is_logged_once_and_gets_all_counts_later(server, ranks, sender, caplog):
    caplog.set_level(logging.INFO, "hookd")
    server.answers += [400, 400]
    assert [sender.send(), sender.send()] == [False, False]
    ranks.add(0, "hookd_steps", 9)
    assert sender.send()
    assert received(server)[1]["hookd_steps"].sum.data_points[0].as_double == 9.0
    ours = [record.levelname for record in caplog.records if record.name.startswith("hookd")]
    assert ours == ["WARNING", "INFO"]
    assert len([record for record in caplog.records if record.name.startswith("opentelemetry")]) == 1


async def serve(directory, endpoint, until=lambda: True):
    """Run a daemon until a condition holds."""
    settings = {"HOOKD_OTLP_ENDPOINT": endpoint, "HOOKD_OTLP_INTERVAL_S": "1"}
    options = {"listen": "127.0.0.1:0", "control": str(directory / "control.sock"), "state_dir": str(directory)}
    async with Service(config.load(options, settings), only=[], environ={}):
        await asyncio.to_thread(wait_until, until, what="what the test waits for")


def test_a_daemon_sends_what_it_serves(server, tmp_path):
    asyncio.run(serve(tmp_path, server.url, lambda: len(server.posts) >= 2))
    assert "hookd_build_info" in received(server)[1]


def test_a_daemon_ends_though_its_collector_does_not_answer(server, tmp_path):
    server.answers += ["hang"]
    asyncio.run(serve(tmp_path, server.url, lambda: server.posts))
    assert "hookd-otlp" in [thread.name for thread in threading.enumerate()], "nobody has waited for it"


def test_without_the_extra_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "hookd.tool.daemon.metrics.otlp", None)
    with pytest.raises(UsageError, match="not installed") as caught:
        asyncio.run(serve(tmp_path, "http://localhost:4318"))
    assert "pip install 'hookd[otlp]'" in caught.value.hint


@pytest.mark.parametrize(
    ("given", "expected"),
    [("", ""), ("http://a:4318", "http://a:4318/v1/metrics"), ("https://a/b", "https://a/b"), ("http://a:1/", "http://a:1/v1/metrics")],
)  # fmt: skip
def test_the_endpoint_may_leave_out_the_usual_path(given, expected):
    assert config.load({"otlp_endpoint": given}, {}).otlp_endpoint == expected
