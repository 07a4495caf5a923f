"""Checks tenancy: no caller sees, or is hindered by, what belongs to another caller (I44)."""

from __future__ import annotations

import json
from collections.abc import Iterator

from conveyor.simulation.client_history import Call, Delivery, History
from conveyor.simulation.invariant_monitor import StateChange

_NOT_FOUND_OR_NOT_NOW = frozenset({404, 429, 500, 503})


def nobody_sees_what_is_anothers(moment: StateChange, call: Call) -> Iterator[str]:
    """I44: a successful response neither belongs to nor names a job of another caller."""
    if not call.is_accepted:
        return
    for promise in moment.history.promises.values():
        if promise.tenant == call.tenant:
            continue
        if promise.job_id in call.path or promise.job_id.encode() in call.answer:
            yield f"call {call.number} of {call.tenant} was shown a job of {promise.tenant}"


def what_is_anothers_is_not_found(moment: StateChange, call: Call) -> Iterator[str]:
    """I44: on every route, an id of another caller is answered like an id that does not exist."""
    if call.status is None or call.status in _NOT_FOUND_OR_NOT_NOW:
        return
    for promise in moment.history.promises.values():
        if promise.tenant != call.tenant and promise.job_id in call.path:
            yield f"call {call.number} of {call.tenant} was answered {call.status}, and not 404"


def nobody_is_told_of_what_is_anothers(moment: StateChange, delivery: Delivery) -> Iterator[str]:
    """I44: a webhook goes only to an address that the owner of its job gave, and names only that
    job."""
    event = json.loads(delivery.body)
    run = moment.after.run_by_id.get(event["run_id"])
    if run is not None and run.job_id != event["job_id"]:
        yield f"event {delivery.event_id} tells of run {run.run_id} of job {run.job_id}"
    for promise in moment.history.promises.values():
        if promise.job_id.encode() not in delivery.body:
            continue
        if promise.job_id != event["job_id"]:
            yield f"event {delivery.event_id} names job {promise.job_id} as well"
        if not _was_named(delivery.url, promise.tenant, moment.history):
            yield f"{delivery.url} was told of job {promise.job_id} of {promise.tenant}"


def _was_named(url: str, tenant: str, history: History) -> bool:
    named = url.encode()
    return any(call.tenant == tenant and named in call.body for call in history.calls)


def a_key_is_its_callers_own(moment: StateChange, call: Call) -> Iterator[str]:
    """I44: a key conflicts only with earlier requests of the same caller."""
    if call.status != 409 or b"idempotency_key_conflict" not in call.answer:
        return
    own = (
        other
        for other in moment.history.calls
        if (other.tenant, other.key, other.path) == (call.tenant, call.key, call.path)
    )
    if all(other.body == call.body for other in own):
        yield f"call {call.number} of {call.tenant} was refused for somebody else's request"
