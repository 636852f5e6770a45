"""Send metrics to an OpenTelemetry collector, from the daemon. See docs/tutorials/otel.md."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.metrics import Observation
from opentelemetry.sdk.metrics import MeterProvider, export
from opentelemetry.sdk.resources import Resource

from hookd.serving import DaemonPlugin, Metrics, Reading, hookimpl

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


class OTel(DaemonPlugin):
    """Exports gauges and counters of all ranks by OTLP over HTTP."""

    name = "otel"

    @hookimpl
    def configure(self, options: Mapping[str, str]) -> None:
        """Read the address and the interval; the default of `endpoint` comes from OpenTelemetry's own variables."""
        exporter = OTLPMetricExporter(endpoint=options.get("endpoint"), timeout=5)
        period_ms = 1000 * float(options.get("every_s", "15"))
        reader = export.PeriodicExportingMetricReader(exporter, export_interval_millis=period_ms)
        self.provider = MeterProvider([reader], Resource.create({"service.name": "hookd"}), shutdown_on_exit=False)
        self.latest: dict[int, Reading] = {}  # by pid; the exporter's thread reads it; a reading is only ever replaced
        self.known: set[str] = set()

    @hookimpl
    def collect(self, ranks: Sequence[Reading], metrics: Metrics) -> None:
        """Keep the latest reading of each rank, and create an instrument for each new name."""
        self.latest.update((rank.pid, rank) for rank in ranks)
        meter = self.provider.get_meter("hookd")
        for family in (family for rank in ranks for family, *_ in rank.numbers()):
            if family.name not in self.known:
                self.known.add(family.name)
                create = meter.create_observable_counter if family.kind == "counter" else meter.create_observable_gauge
                create(family.name, [functools.partial(self._observe, family.name)], description=family.help)
        metrics.gauge("instruments", "Exported metrics, of all runs.", len(self.known))

    def _observe(self, name: str, _options: object) -> Iterator[Observation]:
        for rank in tuple(self.latest.values()):
            for labels, value in rank.series(name):
                yield Observation(value, {**labels, "run": rank.run, "rank": rank.rank})

    @hookimpl
    def target_lost(self, target: Reading) -> None:
        """Stop exporting a process that has ended."""
        self.latest.pop(target.pid, None)

    @hookimpl
    def close(self) -> None:
        """Send the last values, within the two seconds that the daemon allows."""
        self.provider.shutdown(timeout_millis=1500)
