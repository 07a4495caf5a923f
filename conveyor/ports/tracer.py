"""Tracer: records what happened as spans (docs/operations.md, OpenTelemetry).

A run has one trace. Its id is the run id as a number of 128 bits, so every process that handles the
run records into the same trace, and nothing is stored for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from conveyor.domain.ids import RunId


class SpanKind(Enum):
    """The role of this process in a span."""

    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanRecord:
    """A span that has ended. `run_id` names the trace. With `is_run`, the span is the run itself,
    the parent of its other spans. `parent` is the traceparent header of a request; such a span
    belongs to the trace of the caller and has a link to the run."""

    name: str
    started_at: float
    ended_at: float
    kind: SpanKind = SpanKind.INTERNAL
    attributes: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    is_error: bool = False
    run_id: RunId | None = None
    is_run: bool = False
    parent: str | None = None


class Tracer(Protocol):
    def record(self, span: SpanRecord) -> None:
        """Queues a span and returns at once. If the queue is full, the span is dropped."""
