"""Send what `/metrics` serves to an OpenTelemetry collector, by OTLP over HTTP with OpenTelemetry's own exporter: the extra `otlp`.

Its variables apply as everywhere (`OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_EXPORTER_OTLP_CERTIFICATE`, …). Counters and histograms are
cumulative. Names are those of Prometheus without `_total`, and units are OpenTelemetry's, so a collector that writes to Prometheus
restores the names that the dashboards and rules use.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import socket
import time
from typing import TYPE_CHECKING, Any

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import export
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from hookd.tool.daemon.metrics.families import PageFamily
from hookd.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prometheus_client.core import Metric, Sample

    from hookd.tool.daemon.metrics.collector import FleetCollector

BATCH = 10_000
"""Maximum number of points in one request."""
TIMEOUT_S = 5.0
"""Timeout of an export, its retries included."""
_UNITS = {"seconds": "s", "bytes": "By", "ratio": "1"}
"""UCUM's names of the units of Prometheus."""
_log = logging.getLogger(__name__)


class OtlpSender:
    """Sends all families at intervals.

    Args:
        collector: of the families.
        endpoint: the URL of the collector, with its path.
        clock: returns unix nanoseconds.
    """

    def __init__(self, collector: FleetCollector, endpoint: str, clock: Callable[[], int] = time.time_ns) -> None:
        self._collector, self._clock, self._began = collector, clock, clock()
        self._endpoint = endpoint
        self._exporter = OTLPMetricExporter(endpoint, timeout=TIMEOUT_S, max_export_batch_size=BATCH)
        self._has_failed = False

    async def run(self) -> None:
        """Send once."""
        await asyncio.to_thread(self.send)

    def send(self) -> bool:
        """Send all families; return whether the collector has them.

        The first failure is logged, and when it works again. Nothing is kept: the next export has all counts.
        """
        data = metrics_data(self._collector.families(), self._began, self._clock())
        is_sent = self._exporter.export(data) is export.MetricExportResult.SUCCESS
        if self._has_failed is is_sent:
            self._has_failed = not is_sent
            if is_sent:
                _log.info("metrics are sent to %s again", self._endpoint)
            else:
                _log.warning(
                    "metrics cannot be sent to %s; it is tried again, and nothing is lost of counters", self._endpoint
                )
        return is_sent

    def close(self) -> None:
        """End an export that waits to be retried, and all later ones."""
        self._exporter.shutdown()


def metrics_data(families: Iterable[Metric | PageFamily], began: int, now: int) -> export.MetricsData:
    """Return families as OpenTelemetry's data.

    Args:
        families: of a scrape.
        began: start of the counts in unix nanoseconds.
        now: time of the values in unix nanoseconds.
    """
    made = (family.metric() if isinstance(family, PageFamily) else family for family in families)
    metrics = [metric for family in made for metric in _converted(family, began, now)]
    resource = Resource.create({
        "service.name": "hookd", "service.version": __version__, "service.instance.id": socket.gethostname(),
        "host.name": socket.gethostname(),
    })  # fmt: skip
    scope = export.ScopeMetrics(InstrumentationScope("hookd", __version__), metrics, "")
    return export.MetricsData([export.ResourceMetrics(resource, [scope], "")])


def _converted(family: Metric, began: int, now: int) -> Iterator[export.Metric]:
    """Yield a family's metrics: one for each name of its samples, or one for a histogram."""

    def metric(name: str, data: Any) -> export.Metric:
        return export.Metric(name, family.documentation, _UNITS.get(family.unit, ""), data)

    cumulative = export.AggregationTemporality.CUMULATIVE
    if family.type == "histogram":
        points = [_histogram(labels, samples, began, now) for labels, samples in _series(family)]
        if complete := [point for point in points if point is not None]:
            yield metric(family.name, export.Histogram(complete, cumulative))
        return
    for name, samples in itertools.groupby(sorted(family.samples, key=_name), key=_name):
        points = [export.NumberDataPoint(dict(one.labels), began, now, one.value) for one in samples]
        if family.type == "counter":
            yield metric(name.removesuffix("_total"), export.Sum(points, cumulative, is_monotonic=True))
        else:
            yield metric(name, export.Gauge(points))


def _name(sample: Sample) -> str:
    return sample.name


def _series(family: Metric) -> Iterator[tuple[Mapping[str, str], list[Sample]]]:
    """Yield the labels and the samples of each series of a histogram."""
    series: dict[tuple[tuple[str, str], ...], list[Sample]] = {}
    for sample in family.samples:
        key = tuple((name, value) for name, value in sorted(sample.labels.items()) if name != "le")
        series.setdefault(key, []).append(sample)
    for key, samples in series.items():
        yield dict(key), samples


def _histogram(labels: Mapping[str, str], samples: list[Sample], began: int, now: int) -> Any:
    """Return the point of a series; None if it has no valid sum, which a histogram of OpenTelemetry needs."""
    buckets = sorted((float(one.labels["le"]), one.value) for one in samples if "le" in one.labels)
    totals = [one.value for one in samples if one.name.endswith("_sum")]
    if not buckets or not totals:
        return None
    below = [0.0, *(count for _, count in buckets)]
    counts = [int(high - low) for low, high in itertools.pairwise(below)]
    bounds = [bound for bound, _ in buckets if bound < math.inf]
    # The extremes are not known; None leaves them out.
    unknown: Any = None
    return export.HistogramDataPoint(dict(labels), began, now, sum(counts), totals[0], counts, bounds, unknown, unknown)
