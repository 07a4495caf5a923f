"""Tracing: what a process records about requests, runs, fetches and deliveries
(docs/operations.md, OpenTelemetry)."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass

import msgspec

from conveyor.domain.ids import RunId, is_ulid, minted_at
from conveyor.domain.model import Event, EventType
from conveyor.ports.tracer import SpanRecord, Tracer

# A run of a million tasks records about a thousand fetches, and a short run all of them.
FIRST_FETCHES = 10
FETCHES_EVERY = 1000

_ENDS = {
    EventType.RUN_COMPLETED: "completed",
    EventType.RUN_STOPPED: "stopped",
    EventType.RUN_FAILED: "failed",
}


@dataclass(slots=True)
class TracedRequest:
    """A request in progress, and the run that it created or changed."""

    run_id: RunId | None = None


_REQUEST: ContextVar[TracedRequest | None] = ContextVar("_REQUEST", default=None)


def begin_request() -> TracedRequest:
    """Begins a request in the current task."""
    traced = TracedRequest()
    _REQUEST.set(traced)
    return traced


def is_traced_fetch(index: int) -> bool:
    """Whether the fetch of the task at this position of the list is recorded."""
    return index < FIRST_FETCHES or index % FETCHES_EVERY == 0


def record_events(tracer: Tracer, events: Sequence[Event]) -> None:
    """Notes the run of the current request, and records each run that has ended."""
    traced = _REQUEST.get()
    for event in events:
        if event.run_id is None or not is_ulid(event.run_id):
            continue
        if traced is not None:
            traced.run_id = event.run_id
        if event.event_type in _ENDS:
            tracer.record(_run_span(event, event.run_id))


def _run_span(event: Event, run_id: RunId) -> SpanRecord:
    stats = msgspec.json.decode(event.data).get("stats", {})
    counts = {
        f"conveyor.tasks.{name}": stats[name] for name in ("total", "failed") if name in stats
    }
    status = _ENDS[event.event_type]
    return SpanRecord(
        name="run",
        started_at=minted_at(run_id),
        ended_at=event.occurred_at,
        attributes={"conveyor.run_id": run_id, "conveyor.run.status": status, **counts},
        is_error=event.event_type is EventType.RUN_FAILED,
        run_id=run_id,
        is_run=True,
    )
