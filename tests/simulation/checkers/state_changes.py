"""Builders of state changes, calls, fetches and deliveries that a test gives to a checker."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from conveyor.domain.changes import KIND_OF_KEY, Row, TaskKey
from conveyor.simulation.backends.snapshot import Address, Lease, Snapshot, compare
from conveyor.simulation.backends.storage_dump import StoredItem
from conveyor.simulation.client_history import AcceptedRequest, Call, Delivery, Fetch, History
from conveyor.simulation.invariant_monitor import StateChange
from tests.builders import JOB, RUN, T0, key_of

TENANT, OTHER_TENANT = "tenant0", "tenant1"


def a_snapshot(*rows: Row, leases: Sequence[Lease] = (), at: float = 0.0) -> Snapshot:
    tables: dict[type, dict[Address, Any]] = {kind: {} for kind in KIND_OF_KEY}
    for row in rows:
        key = key_of(row)
        address = (key.run_id, key.task_id) if isinstance(key, TaskKey) else _fields(key)
        tables[type(key)][address] = row
    return Snapshot(at=at, now=T0 + at, rows=tables, leases=leases)


def _fields(key: Any) -> Address:
    return tuple(getattr(key, name) for name in key.__struct_fields__)


def change_to(
    *rows: Row,
    before: Sequence[Row] = (),
    history: History | None = None,
    bodies: Mapping[str, bytes] | None = None,
    leases: Sequence[Lease] = (),
    leases_before: Sequence[Lease] = (),
    rows_come_first: bool = False,
    stored_items: Sequence[StoredItem] = (),
) -> StateChange:
    """Builds the change from the rows `before` to these rows."""
    earlier, later = a_snapshot(*before, leases=leases_before), a_snapshot(*rows, leases=leases)
    stored = bodies or {}
    return StateChange(
        before=earlier,
        after=later,
        changes=[change for change in compare(earlier, later) if change.old != change.new],
        history=history or History(),
        body=stored.get,
        bodies=lambda: [*stored],
        rows_come_first=rows_come_first,
        stored_items=lambda: stored_items,
    )


def a_call(method: str = "GET", path: str = f"/v1/jobs/{JOB}", **fields: Any) -> Call:
    """Builds a call that was answered immediately, with `answer` as JSON."""
    at = fields.pop("at", 1.0)
    values: dict[str, Any] = {
        "number": 1,
        "tenant": TENANT,
        "method": method,
        "path": path,
        "key": None,
        "sent_at": at,
        "answered_at": at,
        "status": 200,
        **fields,
    }
    for name in ("body", "answer"):
        if not isinstance(values.get(name, b""), bytes):
            values[name] = json.dumps(values[name]).encode()
    return Call(**{"body": b"", **values})


def a_submit(*urls: str, key: str = "key-1", **fields: Any) -> Call:
    """Builds the accepted submit of a job's first list."""
    values = {"job_id": JOB, "accepted_tasks": len(urls), "latest_run": {"run_id": RUN}}
    body = {"tasks": [{"url": url} for url in urls]}
    request = {"path": "/v1/jobs", "key": key, "body": body, "answer": values, **fields}
    return a_call("POST", **request)


def a_promise(lines_count: int = 1, **fields: Any) -> AcceptedRequest:
    values = {"tenant": TENANT, "job_id": JOB, "run_id": RUN, "lines_count": lines_count}
    return AcceptedRequest(**{**values, **fields})


def with_lines(lines_count: int = 1, **fields: Any) -> History:
    """Builds a history in which a submit of `lines_count` lines was accepted."""
    return History(accepted_requests={JOB: a_promise(lines_count)}, **fields)


def a_fetch(task_id: str, claim: int = 1, **fields: Any) -> Fetch:
    values = {"process": "worker0", "run_id": RUN, "started_at": 1.0, **fields}
    return Fetch(task_id=task_id, claim_id=str(claim), **values)


def a_delivery(event_id: str = "EVENT", **fields: Any) -> Delivery:
    event = {"event_id": event_id, "event_type": "run.completed", "run_id": RUN}
    values: dict[str, Any] = {
        "event_id": event_id,
        "url": "https://tenant0.hooks.example/1",
        "body": json.dumps(event).encode(),
        "headers": {},
        "at": 1.0,
        "status": 204,
        **fields,
    }
    return Delivery(**values)
