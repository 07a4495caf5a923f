"""Telemetry: defines every metric with its labels (docs/operations.md, Metrics).

This module does not know the domain.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Protocol

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
GROUP_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayMetrics:
    """The metrics of calls to a remote gateway."""

    calls: Gauge
    calls_abandoned: Gauge
    circuits_open: Gauge
    refusals: Counter
    deferred: Counter


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageMetrics:
    """The metrics of the storage of pages, from the view of this process."""

    away: Gauge
    pages_held: Gauge


class FetchMetrics(Collector):
    """The metrics of fetches, by a direct or a remote gateway.

    They are plain numbers until a scrape reads them. A Histogram and two Counters take a lock and
    several calls for each fetch, which is 1 % of the CPU of a page.
    """

    def __init__(self) -> None:
        self._buckets = [0] * (len(LATENCY_BUCKETS_S) + 1)
        self._seconds = 0.0
        self._body_bytes = 0
        self._responses: dict[str, int] = {}

    def count(self, status_class: str, *, duration_s: float, body_bytes: int) -> None:
        self._buckets[bisect_left(LATENCY_BUCKETS_S, duration_s)] += 1
        self._seconds += duration_s
        self._body_bytes += body_bytes
        self._responses[status_class] = self._responses.get(status_class, 0) + 1

    def describe(self) -> Iterator[Metric]:
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        bounds = (*map(floatToGoString, LATENCY_BUCKETS_S), "+Inf")
        yield HistogramMetricFamily(
            "conveyor_fetch_seconds",
            "Seconds from the start of a fetch to its outcome.",
            buckets=list(zip(bounds, accumulate(self._buckets), strict=True)),
            sum_value=self._seconds,
        )
        responses = CounterMetricFamily(
            "conveyor_fetch_responses",
            "Outcomes of fetches by status class: of the page, or of the problem if there is none; "
            "`deferred` if the call was deferred.",
            labels=["status_class"],
        )
        for status_class, count in self._responses.items():
            responses.add_metric([status_class], count)
        yield responses
        yield CounterMetricFamily(
            "conveyor_fetch_body_bytes",
            "Bytes of the pages that were fetched.",
            value=self._body_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramMetrics:
    """What runs, and on which disk."""

    build_info: Gauge
    disk_free: Gauge
    disk_size: Gauge


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMetrics:
    """What the store says about the live runs of all callers. An API process refreshes it when it
    serves `/metrics`."""

    live: Gauge
    tasks: Gauge
    ingesting: Gauge
    oldest_waiting: Gauge


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotMetrics:
    """The slots of this process, and the leases of the tasks in them."""

    total: Gauge
    usable: Gauge
    leases: Gauge
    leases_lost: Counter


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundMetrics:
    """Work that one process does piece by piece: lists that are ingested, and export files."""

    running: Gauge
    processed: Counter


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """All metrics of one registry."""

    registry: CollectorRegistry
    http_requests: Counter
    http_seconds: Histogram
    task_outcomes: Counter
    fetches: FetchMetrics
    webhook_deliveries: Counter
    runs: RunMetrics
    slots: SlotMetrics
    ingest: BackgroundMetrics
    exports: BackgroundMetrics
    actors: ActorUsage
    program: ProgramMetrics
    receives: Counter
    messages_delivered: Counter
    messages_bounced: Counter
    fetches_preempted: Counter
    quota_refusals: Counter
    inflight: Gauge
    group_size: Histogram
    invariant_violations: Counter
    demand_percent: Gauge
    coordinator_away: Gauge
    gateway: GatewayMetrics
    storage: StorageMetrics


def make_metrics(registry: CollectorRegistry) -> Metrics:
    """Creates all metrics. A registry accepts only one set, so each process calls this once."""
    # A `_created` sample beside every counter says nothing that a scraper needs.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    counter = partial(Counter, registry=registry)
    gauge = partial(Gauge, registry=registry)
    histogram = partial(Histogram, registry=registry)
    return Metrics(
        registry=registry,
        http_requests=counter(
            "conveyor_http_requests", "HTTP requests answered.", ("method", "route", "status")
        ),
        http_seconds=histogram(
            "conveyor_http_request_seconds",
            "Seconds from a request's headers to its answer's.",
            ("method",),
            buckets=LATENCY_BUCKETS_S,
        ),
        task_outcomes=_make_task_outcomes(registry),
        fetches=_make_fetch_metrics(registry),
        webhook_deliveries=counter(
            "conveyor_webhook_deliveries",
            "Attempts to deliver a webhook event: delivered or failed.",
            ("outcome",),
        ),
        runs=_make_run_metrics(registry),
        slots=_make_slot_metrics(registry),
        ingest=_make_background_metrics(registry, "ingest_batches", "Lists"),
        exports=_make_background_metrics(registry, "exports", "Exports"),
        actors=_make_actor_usage(registry),
        program=_make_program_metrics(registry),
        receives=counter("conveyor_queue_receives", "Receive calls made on run queues."),
        messages_delivered=counter(
            "conveyor_queue_messages_delivered", "Messages that receive calls brought."
        ),
        messages_bounced=counter(
            "conveyor_queue_messages_bounced", "Messages that were put back unused."
        ),
        quota_refusals=counter(
            "conveyor_quota_refusals",
            "Requests that were refused because a quota was used up.",
            ("quota",),
        ),
        fetches_preempted=counter(
            "conveyor_fetches_preempted",
            "Fetches that were interrupted for a caller with fewer slots.",
        ),
        inflight=gauge("conveyor_tasks_inflight", "Tasks being fetched now."),
        group_size=histogram(
            "conveyor_group_size",
            "Changes that were committed together.",
            ("kind",),
            buckets=GROUP_BUCKETS,
        ),
        invariant_violations=counter(
            "conveyor_invariant_violations",
            "Things that must never happen and did.",
            ("invariant",),
        ),
        demand_percent=gauge(
            "conveyor_demand_percent", "Demand for slots in percent of all slots, to scale workers."
        ),
        coordinator_away=gauge(
            "conveyor_coordinator_away", "1 while this process keeps to its own share of every cap."
        ),
        storage=_make_storage_metrics(registry),
        gateway=_make_gateway_metrics(registry),
    )


def _make_task_outcomes(registry: CollectorRegistry) -> Counter:
    return Counter(
        "conveyor_task_outcomes",
        "Attempts that were settled: successful, failed (with the reason), retried later, or "
        "refused because another worker was first.",
        ("result", "reason"),
        registry=registry,
    )


def _make_fetch_metrics(registry: CollectorRegistry) -> FetchMetrics:
    metrics = FetchMetrics()
    registry.register(metrics)
    return metrics


def _make_program_metrics(registry: CollectorRegistry) -> ProgramMetrics:
    return ProgramMetrics(
        build_info=Gauge(
            "conveyor_build_info",
            "Always 1; the labels name the version and the build.",
            ("version", "build"),
            registry=registry,
        ),
        disk_free=Gauge(
            "conveyor_disk_free_bytes",
            "Bytes that are free on the disk of the data directory.",
            registry=registry,
        ),
        disk_size=Gauge(
            "conveyor_disk_size_bytes",
            "Bytes of the disk of the data directory, used and free.",
            registry=registry,
        ),
    )


def _make_run_metrics(registry: CollectorRegistry) -> RunMetrics:
    return RunMetrics(
        live=Gauge(
            "conveyor_runs_live",
            "Live runs: running, paused, or pending for want of tasks.",
            ("state",),
            registry=registry,
        ),
        tasks=Gauge(
            "conveyor_tasks_unfinished",
            "Tasks of live runs that have not ended: inflight, retrying or pending.",
            ("state",),
            registry=registry,
        ),
        ingesting=Gauge(
            "conveyor_tasks_ingesting",
            "Lines of accepted lists that are not tasks of their run yet.",
            registry=registry,
        ),
        oldest_waiting=Gauge(
            "conveyor_tasks_oldest_waiting_seconds",
            "Seconds since the start of the oldest live run with tasks that wait; 0 if none does.",
            registry=registry,
        ),
    )


def _make_slot_metrics(registry: CollectorRegistry) -> SlotMetrics:
    gauge = partial(Gauge, registry=registry)
    return SlotMetrics(
        total=gauge("conveyor_slots", "Tasks of all callers that this process can fetch at once."),
        usable=gauge(
            "conveyor_slots_usable",
            "Slots that the callers with tasks can use now; the others are kept for the next "
            "caller. Saturation is conveyor_tasks_inflight divided by this.",
        ),
        leases=gauge("conveyor_leases_held", "Leases of running tasks that this process renews."),
        leases_lost=Counter(
            "conveyor_leases_lost",
            "Tasks that were cancelled because their lease, message or claim was lost.",
            registry=registry,
        ),
    )


def _make_background_metrics(
    registry: CollectorRegistry, name: str, subject: str
) -> BackgroundMetrics:
    return BackgroundMetrics(
        running=Gauge(
            f"conveyor_{name}_running", f"{subject} that this process works on.", registry=registry
        ),
        processed=Counter(
            f"conveyor_{name}_processed",
            f"{subject} that this process has worked on, by outcome.",
            ("outcome",),
            registry=registry,
        ),
    )


def _make_actor_usage(registry: CollectorRegistry) -> ActorUsage:
    usage = ActorUsage()
    registry.register(usage)
    return usage


def _make_storage_metrics(registry: CollectorRegistry) -> StorageMetrics:
    return StorageMetrics(
        away=Gauge(
            "conveyor_storage_away",
            "1 while this process fetches nothing because pages cannot be stored.",
            registry=registry,
        ),
        pages_held=Gauge(
            "conveyor_pages_held",
            "Pages that were fetched and wait in memory until they can be stored.",
            registry=registry,
        ),
    )


def _make_gateway_metrics(registry: CollectorRegistry) -> GatewayMetrics:
    return GatewayMetrics(
        calls=Gauge(
            "conveyor_gateway_calls",
            "Calls that count against the limits of a remote gateway now.",
            registry=registry,
        ),
        calls_abandoned=Gauge(
            "conveyor_gateway_calls_abandoned",
            "Calls that were cut off and that the gateway may still be working on.",
            registry=registry,
        ),
        circuits_open=Gauge(
            "conveyor_gateway_circuits_open",
            "Callers for whom the gateway is away: single calls test it.",
            registry=registry,
        ),
        refusals=Counter(
            "conveyor_gateway_refusals",
            "Calls that the gateway refused for having too many under way.",
            registry=registry,
        ),
        deferred=Counter(
            "conveyor_gateway_deferred",
            "Calls whose task was deferred, without an attempt.",
            ("reason",),
            registry=registry,
        ),
    )


@dataclass(frozen=True, slots=True)
class ActorFigures:
    """The figures of one actor, or of all actors of one kind. An actor without a mailbox has no
    messages."""

    name: str
    restarts: int
    messages: int | None = None
    capacity: int | None = None


class ActorUsage(Collector):
    """Exports the restarts and the mailboxes of the actors at each scrape."""

    def __init__(self) -> None:
        self._read: Callable[[], Iterable[ActorFigures]] = tuple

    def watch(self, read: Callable[[], Iterable[ActorFigures]]) -> None:
        """Sets where the figures come from."""
        self._read = read

    def describe(self) -> Iterator[Metric]:
        return self._families(())

    def collect(self) -> Iterator[Metric]:
        return self._families(tuple(self._read()))

    def _families(self, figures: Iterable[ActorFigures]) -> Iterator[Metric]:
        restarts = CounterMetricFamily(
            "conveyor_actor_restarts",
            "Restarts of actors, for the crash of a sibling too.",
            labels=["actor"],
        )
        messages = GaugeMetricFamily(
            "conveyor_mailbox_messages", "Messages that wait in a mailbox.", labels=["actor"]
        )
        capacity = GaugeMetricFamily(
            "conveyor_mailbox_capacity", "Messages that a mailbox can hold.", labels=["actor"]
        )
        for actor in figures:
            restarts.add_metric([actor.name], actor.restarts)
            if actor.messages is not None and actor.capacity is not None:
                messages.add_metric([actor.name], actor.messages)
                capacity.add_metric([actor.name], actor.capacity)
        yield from (restarts, messages, capacity)


class Metered(Protocol):
    """The counts that a shared engine keeps of its own calls."""

    @property
    def calls(self) -> Mapping[str, int]: ...
    @property
    def failures(self) -> Mapping[str, int]: ...
    @property
    def retries(self) -> Mapping[str, int]: ...
    @property
    def read_units(self) -> float: ...
    @property
    def write_units(self) -> float: ...
    @property
    def rows_read(self) -> int: ...
    @property
    def rows_returned(self) -> int: ...
    @property
    def price_millionths(self) -> float: ...


class EngineUsage(Collector):
    """Exports the current counts of a shared engine at each scrape. `cache_outcomes` counts reads
    of its cache by their result."""

    def __init__(self, metered: Metered, cache_outcomes: Mapping[str, int]) -> None:
        self._metered = metered
        self._cache_outcomes = cache_outcomes

    def collect(self) -> Iterator[CounterMetricFamily]:
        it = self._metered
        units = {"read": it.read_units, "write": it.write_units}
        rows = {"read": it.rows_read, "returned": it.rows_returned}
        yield _counts("calls", "Calls made, retries included.", "call", it.calls)
        yield _counts("call_failures", "Calls that failed.", "call", it.failures)
        yield _counts("call_retries", "Calls made again.", "call", it.retries)
        yield _counts("capacity_units", "Capacity units used.", "kind", units)
        yield _counts("rows", "Rows read, and of them returned.", "kind", rows)
        yield _counts("cache_looks", "Looks into the cache.", "outcome", self._cache_outcomes)
        yield CounterMetricFamily(
            "conveyor_engine_list_price_dollars",
            "What the calls cost by the list.",
            value=it.price_millionths / 1e6,
        )


def _counts(
    name: str, help_text: str, label: str, values: Mapping[str, float]
) -> CounterMetricFamily:
    family = CounterMetricFamily(f"conveyor_engine_{name}", help_text, labels=[label])
    for label_value, value in sorted(values.items()):
        family.add_metric([label_value], value)
    return family
