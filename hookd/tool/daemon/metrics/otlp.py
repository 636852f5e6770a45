"""Send what `/metrics` serves to an OpenTelemetry collector, by OTLP over HTTP with OpenTelemetry's own exporter: the extra `otlp`.

Its variables apply as everywhere (`OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_EXPORTER_OTLP_CERTIFICATE`, …). Counters and histograms are
cumulative. Names are those of Prometheus without `_total`, and units are OpenTelemetry's, so a collector that writes to Prometheus
restores the names that the dashboards and rules use.
"""

from __future__ import annotations

import itertools
import logging
import math
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import export
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from hookd.tool.daemon.metrics.families import PageFamily
from hookd.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from prometheus_client.core import Metric, Sample

    from hookd.tool.daemon.metrics.collector import FleetCollector

BATCH = 10_000
"""Points from which on a request is sent, so that the memory for one is bounded."""
TIMEOUT_S = 5.0
"""Timeout of a request, its retries included, as far as the collector sends nothing."""
_UNITS = {"seconds": "s", "bytes": "By", "ratio": "1"}
"""UCUM's names of the units of Prometheus."""
_THEIRS = logging.getLogger("opentelemetry.exporter")
"""Logs the reason of each failure; after the first it is silenced until an export has succeeded."""
_log = logging.getLogger(__name__)


class OtlpSender:
    """Sends all families at intervals, in a thread that the daemon's end does not wait for.

    Args:
        collector: of the families.
        endpoint: the URL of the collector, with its path.
        clock: returns unix nanoseconds.
    """

    def __init__(self, collector: FleetCollector, endpoint: str, clock: Callable[[], int] = time.time_ns) -> None:
        self._collector, self._clock, self._began = collector, clock, clock()
        self._endpoint = endpoint
        self._exporter = OTLPMetricExporter(endpoint, timeout=TIMEOUT_S)
        self._has_failed = False
        self._closed, self._reads = threading.Event(), threading.Lock()

    def start(self, interval_s: float) -> None:
        """Send at this interval from now on."""
        threading.Thread(target=self._run, args=(interval_s,), name="hookd-otlp", daemon=True).start()

    def _run(self, interval_s: float) -> None:
        while not self._closed.is_set():
            try:
                self.send()
            except Exception:  # noqa: BLE001  the next one may succeed
                _log.exception("metrics cannot be sent to %s", self._endpoint)
            self._closed.wait(interval_s)

    def send(self) -> bool:
        """Send all families; return whether the collector has them.

        The first failure is logged, and when it works again. Nothing is kept: the next export has all counts.
        """
        is_sent = all(self._exporter.export(data) is export.MetricExportResult.SUCCESS for data in self._requests())
        if self._has_failed is is_sent and not self._closed.is_set():
            self._has_failed = not is_sent
            _THEIRS.setLevel(logging.NOTSET if is_sent else logging.CRITICAL)
            if is_sent:
                _log.info("metrics are sent to %s again", self._endpoint)
            else:
                _log.warning(
                    "metrics cannot be sent to %s; it is tried again, and nothing is lost of counters", self._endpoint
                )
        return is_sent

    def _requests(self) -> Iterator[export.MetricsData]:
        """Yield the data of each request: some families, until they have BATCH points. Pages are read under the lock."""
        with self._reads:
            families = iter([] if self._closed.is_set() else self._collector.families())
        now, is_over = self._clock(), False
        while not is_over:
            metrics: list[export.Metric] = []
            points = 0
            with self._reads:
                is_over = self._closed.is_set()
                while not is_over and points < BATCH:
                    if (family := next(families, None)) is None:
                        is_over = True
                        break
                    made = family.metric() if isinstance(family, PageFamily) else family
                    points += len(made.samples)
                    metrics += _converted(made, self._began, now)
            if metrics:
                yield _request(metrics)

    def close(self) -> None:
        """End it: no page is read any more when this returns."""
        self._closed.set()
        with self._reads:
            self._exporter.shutdown()


def _request(metrics: list[export.Metric]) -> export.MetricsData:
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
