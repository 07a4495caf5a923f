"""Checks idempotency keys: each makes one thing and finally gets its answer (I3, I5, I7)."""

from __future__ import annotations

from collections.abc import Iterator

from conveyor.domain import limits
from conveyor.domain.ids import FIRST_BATCH
from conveyor.simulation.client_history import Call
from conveyor.simulation.invariant_monitor import StateChange

# Processes may disagree by this much about when a key expires.
CLOCKS_APART_S = 180.0
# When clients return after keys have expired, the keys have expired by every clock.
KEYS_EXPIRED_S = 2.0 * CLOCKS_APART_S

_COME_BACK_LATER = (b"idempotency_in_progress", b"still being ingested")


def every_key_gets_its_answer(state: StateChange) -> Iterator[str]:
    """I5: when everything has ended, no request with a key is still told to come back later."""
    last: dict[tuple[str, str, str, bytes], Call] = {}
    for call in state.history.calls:
        if call.key is not None and call.method == "POST":
            last[call.tenant, call.path, call.key, call.body] = call
    for call in last.values():
        if any(words in call.answer for words in _COME_BACK_LATER):
            yield f"call {call.number} with key {call.key} never got a final answer"


def an_expired_key_is_a_new_one(state: StateChange, call: Call) -> Iterator[str]:
    """I7: a key whose time is over neither returns the old answer nor causes a conflict, whether or
    not its record was removed. This is not checked where a clock leaps by days: the key may last
    longer."""
    if state.history.leaps_days:
        return
    for other in state.history.calls if call.key is not None else ():
        is_used = is_same_key(other, call) and other.is_accepted
        if other is call or not is_used or not _is_expired(other, call):
            continue
        if b"idempotency_key_conflict" in call.answer:
            yield f"call {call.number} conflicts with expired call {other.number}"
        elif call.is_accepted and call.answer == other.answer:
            yield f"call {call.number} got the answer of expired call {other.number}"


def is_same_key(other: Call, call: Call) -> bool:
    return (other.tenant, other.path, other.key) == (call.tenant, call.path, call.key)


def _is_expired(other: Call, call: Call) -> bool:
    """Whether the key has expired. Records count from when they were made, which was before the
    answer."""
    assert other.answered_at is not None
    return call.sent_at - other.answered_at > limits.IDEMPOTENCY_TTL_S + CLOCKS_APART_S


def is_in_force(other: Call, call: Call) -> bool:
    """Whether the key may still be valid for the earlier call."""
    return call.sent_at - other.sent_at < limits.IDEMPOTENCY_TTL_S


def what_was_made_belongs_to_its_key(state: StateChange) -> Iterator[str]:
    """I3: clients here send a key with every request that creates something, so everything that
    exists belongs to the record of a key; a second thing made under one key would belong to none.
    Records of keys expire by the wall clock, so this is not checked where it leaps by days."""
    if state.history.leaps_days:
        return
    subjects = {record.subject for record in state.after.records.values()}
    for job in state.after.jobs.values():
        if job.job_id not in subjects:
            yield f"job {job.job_id} belongs to no key"
    for run in state.after.runs.values():
        if run.sequence > 1 and run.scheduled_for is None and run.run_id not in subjects:
            yield f"run {run.run_id} belongs to no key"
    for batch in state.after.batches.values():
        if batch.batch_id != FIRST_BATCH and batch.batch_id not in subjects:
            yield f"list {batch.batch_id} of run {batch.run_id} belongs to no key"
