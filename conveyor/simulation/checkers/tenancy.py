"""Checks tenancy: no caller sees, or is hindered by, what belongs to another caller (I44)."""

from __future__ import annotations

import json
from collections.abc import Iterator

from conveyor.simulation.client_history import Call, Delivery, History
from conveyor.simulation.invariant_monitor import StateChange

_NOT_FOUND_OR_NOT_NOW = frozenset({404, 429, 500, 503})


def no_caller_sees_data_of_another(state: StateChange, call: Call) -> Iterator[str]:
    """I44: a successful response neither belongs to nor names a job of another caller."""
    if not call.is_accepted:
        return
    for accepted in state.history.accepted_requests.values():
        if accepted.tenant == call.tenant:
            continue
        if accepted.job_id in call.path or accepted.job_id.encode() in call.answer:
            yield f"call {call.number} of {call.tenant} was shown a job of {accepted.tenant}"


def ids_of_other_callers_are_not_found(state: StateChange, call: Call) -> Iterator[str]:
    """I44: on every route, an id of another caller is answered like an id that does not exist."""
    if call.status is None or call.status in _NOT_FOUND_OR_NOT_NOW:
        return
    for accepted in state.history.accepted_requests.values():
        if accepted.tenant != call.tenant and accepted.job_id in call.path:
            yield f"call {call.number} of {call.tenant} was answered {call.status}, and not 404"


def no_webhook_names_a_job_of_another_caller(
    state: StateChange, delivery: Delivery
) -> Iterator[str]:
    """I44: a webhook goes only to an address that the owner of its job gave, and names only that
    job."""
    event = json.loads(delivery.body)
    run = state.after.run_by_id.get(event["run_id"])
    if run is not None and run.job_id != event["job_id"]:
        yield f"event {delivery.event_id} names run {run.run_id} of job {run.job_id}"
    for accepted in state.history.accepted_requests.values():
        if accepted.job_id.encode() not in delivery.body:
            continue
        if accepted.job_id != event["job_id"]:
            yield f"event {delivery.event_id} names job {accepted.job_id} as well"
        if not _was_named(delivery.url, accepted.tenant, state.history):
            yield f"{delivery.url} received job {accepted.job_id} of {accepted.tenant}"


def _was_named(url: str, tenant: str, history: History) -> bool:
    named = url.encode()
    return any(call.tenant == tenant and named in call.body for call in history.calls)


def a_key_conflicts_only_for_its_caller(state: StateChange, call: Call) -> Iterator[str]:
    """I44: a key conflicts only with earlier requests of the same caller."""
    if call.status != 409 or b"idempotency_key_conflict" not in call.answer:
        return
    own = (
        other
        for other in state.history.calls
        if (other.tenant, other.key, other.path) == (call.tenant, call.key, call.path)
    )
    if all(other.body == call.body for other in own):
        yield f"call {call.number} of {call.tenant} was refused for another caller's key"
