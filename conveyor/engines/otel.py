"""Exports spans and metrics over OTLP, with the packages of OpenTelemetry
(docs/operations.md, OpenTelemetry).

The OTEL_* variables configure it: the packages read them. Two threads of their own send what was
recorded, so that no request and no fetch waits for a collector. Their queues are bounded.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import trio
from opentelemetry.context import Context as OtelContext
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    Status,
    StatusCode,
    TraceFlags,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace import SpanKind as OtelKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric as Family

import conveyor
from conveyor.domain.ids import RunId, ulid_number
from conveyor.ports.tracer import SpanKind, SpanRecord

# The last export may take this long when the process ends; then what is left is lost.
SHUTDOWN_S = 5.0
_SCOPE = "conveyor"
_KINDS = {
    SpanKind.INTERNAL: OtelKind.INTERNAL,
    SpanKind.SERVER: OtelKind.SERVER,
    SpanKind.CLIENT: OtelKind.CLIENT,
}
_SPAN_ID_MASK = (1 << 64) - 1
_NS = 1_000_000_000


@asynccontextmanager
async def open_otel(
    registry: CollectorRegistry,
    signals: frozenset[str],
    *,
    now: Callable[[], float],
    instance: str,
    interval_s: float,
) -> AsyncGenerator[OtelTracer | None, None]:
    """Exports what `signals` names, `traces` and `metrics`, until the block ends."""
    resource = _make_resource(instance)
    tracer = OtelTracer(resource) if "traces" in signals else None
    metrics = None
    if "metrics" in signals:
        metrics = MetricsThread(registry, resource, now, interval_s)
        metrics.start()
    try:
        yield tracer
    finally:
        with trio.move_on_after(SHUTDOWN_S, shield=True):
            await trio.to_thread.run_sync(_close, tracer, metrics, abandon_on_cancel=True)


def _close(tracer: OtelTracer | None, metrics: MetricsThread | None) -> None:
    if metrics is not None:
        metrics.stop()
    if tracer is not None:
        tracer.close()


def _make_resource(instance: str) -> Resource:
    own = {"service.version": conveyor.__version__, "service.instance.id": instance}
    resource = Resource.create(own)
    if str(resource.attributes["service.name"]).startswith("unknown_service"):
        return resource.merge(Resource({"service.name": "conveyor"}))
    return resource


@dataclass(slots=True)
class _Ids(IdGenerator):
    """Random ids, or those that are set for the next span."""

    trace_id: int | None = None
    span_id: int | None = None
    _random: RandomIdGenerator = field(default_factory=RandomIdGenerator)

    def generate_trace_id(self) -> int:
        return self.trace_id or self._random.generate_trace_id()

    def generate_span_id(self) -> int:
        return self.span_id or self._random.generate_span_id()


class OtelTracer:
    """Records spans. Call it from one thread: the ids of the next span are shared state."""

    def __init__(self, resource: Resource) -> None:
        self._ids = _Ids()
        self._provider = TracerProvider(
            resource=resource, id_generator=self._ids, shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer(_SCOPE, conveyor.__version__)
        self._propagator = TraceContextTextMapPropagator()

    def record(self, span: SpanRecord) -> None:
        context, links = self._place(span)
        if span.is_run and span.run_id is not None:
            number = ulid_number(span.run_id)
            self._ids.trace_id, self._ids.span_id = number, number & _SPAN_ID_MASK
        try:
            started = self._tracer.start_span(
                span.name,
                context=context,
                kind=_KINDS[span.kind],
                attributes=dict(span.attributes),
                links=links,
                start_time=int(span.started_at * _NS),
            )
        finally:
            self._ids.trace_id = self._ids.span_id = None
        if span.is_error:
            started.set_status(Status(StatusCode.ERROR))
        started.end(end_time=int(max(span.started_at, span.ended_at) * _NS))

    def _place(self, span: SpanRecord) -> tuple[OtelContext, list[Link]]:
        """Returns the parent of a span, and its links."""
        run = None if span.run_id is None or span.is_run else self._run_context(span.run_id)
        if span.parent is not None:
            context = self._propagator.extract({"traceparent": span.parent}, OtelContext())
            if get_current_span(context).get_span_context().is_valid:
                return context, [] if run is None else [Link(run)]
        if run is None:
            return OtelContext(), []
        return set_span_in_context(NonRecordingSpan(run), OtelContext()), []

    def _run_context(self, run_id: RunId) -> SpanContext:
        """The span of a run, which is recorded when the run ends. The sampler decides by the trace
        id, so every process decides alike."""
        number = ulid_number(run_id)
        decision = self._provider.sampler.should_sample(None, number, "run").decision
        is_sampled = decision is Decision.RECORD_AND_SAMPLE
        flags = TraceFlags(TraceFlags.SAMPLED if is_sampled else TraceFlags.DEFAULT)
        return SpanContext(number, number & _SPAN_ID_MASK, is_remote=True, trace_flags=flags)

    def close(self) -> None:
        self._provider.shutdown()


class MetricsThread:
    """Sends every metric of a registry every `interval_s`, and once more at the end."""

    def __init__(
        self,
        registry: CollectorRegistry,
        resource: Resource,
        now: Callable[[], float],
        interval_s: float,
    ) -> None:
        self._registry = registry
        self._resource = resource
        self._exporter = OTLPMetricExporter()
        self._now = now
        self._interval_s = interval_s
        self._began_ns = int(now() * _NS)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="otlp-metrics", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(SHUTDOWN_S)

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            self._exporter.export(self._collect())
        self._exporter.export(self._collect())
        self._exporter.shutdown()

    def _collect(self) -> MetricsData:
        now_ns = int(self._now() * _NS)
        metrics = [
            metric
            for family in self._registry.collect()
            if (metric := convert(family, self._began_ns, now_ns)) is not None
        ]
        scope = ScopeMetrics(InstrumentationScope(_SCOPE, conveyor.__version__), metrics, "")
        return MetricsData([ResourceMetrics(self._resource, [scope], "")])


def convert(family: Family, began_ns: int, now_ns: int) -> Metric | None:
    """Converts a metric of Prometheus. Returns None if it has no sample."""
    if not family.samples:
        return None
    data: Sum | Gauge | Histogram
    if family.type == "histogram":
        points = list(_histogram_points(family, began_ns, now_ns))
        data = Histogram(points, AggregationTemporality.CUMULATIVE)
    else:
        numbers = [
            NumberDataPoint(dict(sample.labels), began_ns, now_ns, sample.value)
            for sample in family.samples
        ]
        if family.type == "counter":
            data = Sum(numbers, AggregationTemporality.CUMULATIVE, is_monotonic=True)
        else:
            data = Gauge(numbers)
    return Metric(family.name, family.documentation, family.unit, data)


def _histogram_points(family: Family, began_ns: int, now_ns: int) -> Iterable[HistogramDataPoint]:
    """One point for each set of labels. Buckets of Prometheus count everything up to their bound;
    those of OTLP count what lies between two bounds."""
    series: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        key = tuple(sorted(labels.items()))
        name = sample.labels.get("le", sample.name.rpartition("_")[2])
        series.setdefault(key, {})[name] = sample.value
    for key, values in series.items():
        yield _point(dict(key), values, began_ns, now_ns)


def _point(
    labels: Mapping[str, str], values: Mapping[str, float], began_ns: int, now_ns: int
) -> HistogramDataPoint:
    bounds = [name for name in values if name not in {"+Inf", "sum", "count"}]
    upto = [0.0, *(values[name] for name in bounds), values["+Inf"]]
    return HistogramDataPoint(
        attributes=dict(labels),
        start_time_unix_nano=began_ns,
        time_unix_nano=now_ns,
        count=int(values["+Inf"]),
        sum=values["sum"],
        bucket_counts=[int(after - before) for before, after in pairwise(upto)],
        explicit_bounds=[float(name) for name in bounds],
        # Prometheus does not keep the extremes. The exporter leaves absent values out.
        min=None,  # type: ignore[arg-type]
        max=None,  # type: ignore[arg-type]
    )
