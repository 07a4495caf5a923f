"""Probes of decisions: pure functions whose result a mutant changes.

A probe calls the swapped function through its module, as the product does.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from conveyor.domain import idempotency, lifecycle, limits, ownership, queries
from conveyor.domain import webhook as webhooks
from conveyor.domain.changes import Chunk
from conveyor.domain.errors import InvalidArgument, make_problem
from conveyor.domain.export import progress
from conveyor.domain.idempotency import Request
from conveyor.domain.ids import FIRST_BATCH, BatchId, CallerId
from conveyor.domain.model import DeliveryAttempt, StagedList, TaskSpec, TaskStatus, Totals
from conveyor.domain.ownership import LiveWorkers
from conveyor.domain.run import ingestion, settlement, termination
from conveyor.domain.run.settlement import Cost, Settled
from conveyor.domain.submit import admission
from conveyor.engines.aws.dynamodb import ingest
from conveyor.simulation.swaps import original_of
from tests.builders import (
    CALLER,
    RUN,
    T0,
    a_batch,
    a_job,
    a_notice,
    a_record,
    a_ref,
    a_run,
    a_task,
    an_export,
)

PROBLEM = make_problem("blocked", "Blocked", 403)
REQUEST = Request(CALLER, "POST", "/v1/jobs", "key", "fingerprint")
LIST = StagedList(key="list", origin_run_id=RUN, origin_batch_id=FIRST_BATCH)
OPEN_LIST = a_batch(source=LIST, total=2, done=2)


def a_chunk() -> Chunk:
    specs = [TaskSpec(index=0, url="https://a.example/"), _bad_line()]
    batch = a_batch(source=LIST, total=2)
    return ingestion.chunk_of_specs(batch, a_run(), specs, cursor="9", now=T0)


def _bad_line() -> TaskSpec:
    return TaskSpec(index=1, url="nonsense", problem=PROBLEM)


def read_with_another_scope() -> str:
    def sign(text: str) -> str:
        return text.replace("\n", "-")

    cursor = queries.make_cursor("position", scope="mine", sign=sign)
    try:
        return queries.read_cursor(cursor, scope="yours", sign=sign)
    except InvalidArgument as refusal:
        return str(refusal)


def _claimed_task() -> Any:
    return a_task(status=TaskStatus.PROCESSING, claim=2, claim_until=T0 + 90)


def _settled() -> Any:
    return settlement.fail(
        a_ref(), _claimed_task(), settlement.LOST_WORKER_REASON, PROBLEM, spent=Cost(), now=T0
    )


def _taken_over() -> Any:
    lapsed = a_record(claimed_until=T0 - 1)
    return idempotency.claim_key(REQUEST, lapsed, subject="another", owner="me", now=T0)


def _failed_delivery() -> Any:
    tried = DeliveryAttempt(T0, 1.0, 500, "http_5xx:500")
    return webhooks.record_failed(a_notice(), tried, retry_after_s=None, now=T0, random=Random(1))


DOMAIN_PROBES: dict[str, Callable[[], object]] = {
    "takeover_makes_another": _taken_over,
    "workers_are_read_once": lambda: LiveWorkers(frozenset({"a"}), T0).is_recent(
        T0 + limits.PRESENCE_TTL_S
    ),
    "short_runs_without_owner": lambda: ownership.owners_wanted(tasks=1, cap=10, slots=200),
    "key_claim_never_lapses": lambda: idempotency.decide(
        a_record(claimed_until=T0 - 1), REQUEST, now=T0
    ),
    "key_of_all_callers": lambda: (
        REQUEST.key_id
        == Request(CallerId("another"), "POST", "/v1/jobs", "key", "fingerprint").key_id
    ),
    "key_without_fingerprint": lambda: idempotency.decide(
        a_record(fingerprint="another"), REQUEST, now=T0
    ),
    "last_answer_stands": lambda: idempotency.answer(REQUEST, 201, "{}"),
    "total_set_not_added": lambda: ingestion.seal(OPEN_LIST, a_run(), now=T0),
    "bad_lines_vanish": lambda: len(a_chunk().tasks),
    "ingest_through_shut_gates": lambda: a_chunk().gate_in,
    "ids_without_batch": lambda: (
        admission.make_tasks(
            [TaskSpec(index=0, url="https://a.example/")], (RUN, BatchId("b")), a_run(), T0
        )[0].task_id
    ),
    "add_after_close": lambda: admission.add_batch(
        a_job(), a_run(), OPEN_LIST, [], is_last=False, now=T0
    ),
    "completed_with_lists_open": lambda: lifecycle.is_complete(
        a_run(last_batch_received=True, open_batches=1), Totals()
    ),
    "completed_before_close": lambda: lifecycle.is_complete(a_run(), Totals()),
    "empty_run_never_completes": lambda: lifecycle.is_complete(
        a_run(last_batch_received=True), Totals()
    ),
    "pending_while_ingesting": lambda: original_of("conveyor.schemas.views:displayed_status")(
        a_run(open_batches=1), Totals()
    ),
    "last_settle_does_not_look": lambda: settlement.may_be_drained(Settled(None)),
    "settle_under_any_claim": _settled,
    "settle_in_any_state": _settled,
    "settle_through_shut_gates": _settled,
    "released_claim_settles": _settled,
    "first_settle_keeps_claim_0": lambda: settlement.release_for_retry(
        a_ref(), a_task(started_at=T0), PROBLEM, spent=Cost(), now=T0
    ),
    "heartbeat_without_guard": lambda: settlement.extend_claim(a_ref(), _claimed_task(), now=T0),
    "held_task_claimed": lambda: settlement.claim(a_ref(), now=T0),
    "tries_not_counted": _settled,
    "lost_workers_not_counted": lambda: settlement.lost_workers_problem(a_task(claim=100)),
    "gates_left_open": lambda: termination.request_stop(a_run(shard_count=2), reason=None, now=T0),
    "two_live_runs": lambda: admission.new_run(a_job(), a_run(sequence=2), [], []),
    "one_scrub_only": lambda: termination.delete_job(a_job(), None, intent_id="s", now=T0),
    "webhook_tried_once": _failed_delivery,
    "cursor_for_anything": read_with_another_scope,
    "export_unfenced": lambda: progress.beat(an_export(), done=1, now=T0),
    "ingest_unfenced": lambda: a_chunk().fence,
    "chunk_counted_again": lambda: ingest._note_counted("table", a_chunk(), None),
}
"""The probe of each mutant, by its name. Its results with and without the mutant are compared."""
