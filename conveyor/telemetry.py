"""Telemetry: defines every metric with its labels, and formats log lines
(docs/operations.md, Metrics).

Log lines never contain headers or keys. URLs are logged without their query strings, because query
strings contain tokens. This module does not know the domain.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal, Protocol, TextIO

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

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


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchMetrics:
    """The metrics of fetches, by a direct or a remote gateway."""

    seconds: Histogram
    responses: Counter
    body_bytes: Counter


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
class LeaseMetrics:
    """The leases of running tasks that this process renews."""

    held: Gauge
    lost: Counter


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
    leases: LeaseMetrics
    ingest: BackgroundMetrics
    exports: BackgroundMetrics
    actors: ActorUsage
    slots: Gauge
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
        leases=_make_lease_metrics(registry),
        ingest=_make_background_metrics(registry, "ingest_batches", "Lists"),
        exports=_make_background_metrics(registry, "exports", "Exports"),
        actors=_make_actor_usage(registry),
        slots=gauge("conveyor_slots", "Tasks that this process can fetch at once."),
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
            "conveyor_demand_percent", "Demand for slots, in percent of the slots of all workers."
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
    return FetchMetrics(
        seconds=Histogram(
            "conveyor_fetch_seconds",
            "Seconds from the start of a fetch to its outcome.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        ),
        responses=Counter(
            "conveyor_fetch_responses",
            "Outcomes of fetches by status class: of the page, or of the problem if there is none; "
            "`deferred` if the call was put off.",
            ("status_class",),
            registry=registry,
        ),
        body_bytes=Counter(
            "conveyor_fetch_body_bytes", "Bytes of the pages that were fetched.", registry=registry
        ),
    )


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


def _make_lease_metrics(registry: CollectorRegistry) -> LeaseMetrics:
    return LeaseMetrics(
        held=Gauge(
            "conveyor_leases_held",
            "Leases of running tasks that this process renews.",
            registry=registry,
        ),
        lost=Counter(
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


# A URL up to its query or fragment, which is replaced. It ends at whitespace, quotes or angle
# brackets, which surround URLs in messages.
_QUERY = re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s?#\"'<>]*)[?#][^\s\"'<>]*", re.IGNORECASE)
# User name and password between the scheme and the host.
_USERINFO = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^\s/?#@\"'<>]*@", re.IGNORECASE)
# Secret parameters of a path without scheme and host, which _QUERY does not match.
_TOKEN = re.compile(r"([?&](?:token|apikey|api_key|key)=)[^\s&\"'<>]+", re.IGNORECASE)
_OWN_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_SECRET_FIELDS = frozenset({"headers", "api_key", "key", "authorization", "cookie", "token"})


def redact(text: str) -> str:
    """Removes the query strings and user names of all URLs in a text."""
    text = _USERINFO.sub(r"\1***@", text)
    text = _QUERY.sub(r"\1?***", text)
    return _TOKEN.sub(r"\1***", text)


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Returns the fields of `extra`. Secrets are hidden even if they were passed by mistake."""
    return {
        name: "***" if name.lower() in _SECRET_FIELDS else _plain(value)
        for name, value in vars(record).items()
        if name not in _OWN_FIELDS
    }


def _plain(value: object) -> object:
    if isinstance(value, bool | int | float) or value is None:
        return value
    return redact(str(value))


def _instant(record: logging.LogRecord) -> str:
    text = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "at": _instant(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redact(record.getMessage()),
            **fields_of(record),
        }
        if record.exc_info:
            line["traceback"] = redact(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """Formats log lines for people."""

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={value}" for name, value in fields_of(record).items())
        line = f"{_instant(record)} {record.levelname:<7} {record.name}: "
        line += redact(record.getMessage()).replace("\n", "\\n")
        if fields:
            line += f" ({fields})".replace("\n", "\\n")
        if record.exc_info:
            line += "\n" + redact(self.formatException(record.exc_info))
        return line


FORMATTERS: dict[str, type[logging.Formatter]] = {"json": JsonFormatter, "text": TextFormatter}


# The id of the request that the current task serves. Tasks and threads that the request starts
# inherit it.
REQUEST_ID: ContextVar[str | None] = ContextVar("REQUEST_ID", default=None)


def add_request_id(record: logging.LogRecord) -> bool:
    """Adds the id of the current request to a log line. Passes every line."""
    request_id = REQUEST_ID.get()
    if request_id is not None and not hasattr(record, "request_id"):
        record.request_id = request_id
    return True


class FloodFilter(logging.Filter):
    """Passes a few equal warnings and errors in each window, and counts the others.

    Lines from the same statement are equal. Without the filter, a repeated outage or crash would
    fill the disk. The next line that passes contains the number of suppressed lines.
    """

    WINDOW_S = 60.0
    LINES_MAX = 10

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        # For each statement: the start of its window, the lines in it, the suppressed lines.
        self._windows: dict[tuple[str, int], tuple[float, int, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        key = (record.pathname, record.lineno)
        now = self._now()
        began_at, count, dropped = self._windows.get(key, (now, 0, 0))
        if now - began_at >= self.WINDOW_S:
            began_at, count = now, 0
        if count >= self.LINES_MAX:
            self._windows[key] = (began_at, count, dropped + 1)
            return False
        self._windows[key] = (began_at, count + 1, 0)
        if dropped:
            record.left_out = dropped
        return True


def set_up_logging(
    style: Literal["json", "text"], *, level: int = logging.INFO, stream: TextIO | None = None
) -> None:
    """Installs one handler on the root logger and removes all others."""
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(FORMATTERS[style]())
    handler.addFilter(FloodFilter())
    handler.addFilter(add_request_id)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
