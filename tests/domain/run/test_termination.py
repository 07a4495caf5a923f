"""Each way in which a run or job ends: the guard of the status change, and what is written with
it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from conveyor.domain import lifecycle
from conveyor.domain.changes import (
    Change,
    Delete,
    Insert,
    JobKey,
    RunKey,
    ScheduleKey,
    StatsKey,
    Update,
)
from conveyor.domain.ids import notice_id
from conveyor.domain.model import (
    CounterState,
    DeletionIntent,
    Job,
    JobStatus,
    JobType,
    Notice,
    NoticeStatus,
    Run,
    RunFailure,
    RunStatus,
    Totals,
    Webhook,
)
from conveyor.domain.run import termination
from tests.builders import JOB, OTHER_RUN, RUN, T0, a_job, a_run

HOOKED = a_job(
    status=JobStatus.CLOSED,
    active_run_id=RUN,
    latest_run_id=RUN,
    webhook=Webhook("https://example.com/hook"),
    external_id="mine",
    metadata={"team": "a"},
)
DONE = a_run(shard_count=2, total=2, planned=2, last_batch_received=True)
ALL_DONE = Totals(admitted=2, done=2, successful=1, failed=1, reasons={"blocked": 1}, credits=3)


def on_run(change: Change) -> Update:
    return _update(change, RunKey(JOB, RUN))


def on_job(change: Change) -> Update:
    return _update(change, JobKey(JOB))


def counters_in(change: Change) -> list[Update]:
    return [
        write
        for write in change.writes
        if isinstance(write, Update) and isinstance(write.key, StatsKey)
    ]


def notice_in(change: Change) -> Notice:
    (notice,) = _inserted(change, Notice)
    assert isinstance(notice, Notice)
    return notice


def _update(change: Change, key: object) -> Update:
    (update,) = (w for w in change.writes if isinstance(w, Update) and w.key == key)
    return update


def _inserted(change: Change, kind: type) -> list[Any]:
    return [w.row for w in change.writes if isinstance(w, Insert) and isinstance(w.row, kind)]


def test_completing_needs_a_live_run_that_is_active_in_its_job() -> None:
    change = termination.complete(HOOKED, DONE, ALL_DONE, now=T0 + 7)

    assert on_run(change).guard.status_in == lifecycle.RUN_LIVE
    assert on_run(change).values["status"] is RunStatus.COMPLETED
    assert on_run(change).values["ended_at"] == T0 + 7
    assert on_job(change).guard.equals == (("active_run_id", RUN),)
    assert on_job(change).values["active_run_id"] is None


def test_completing_closes_the_counters_of_every_shard() -> None:
    change = termination.complete(HOOKED, DONE, ALL_DONE, now=T0)

    assert [gate.key for gate in counters_in(change)] == [
        StatsKey(JOB, RUN, 0),
        StatsKey(JOB, RUN, 1),
    ]
    assert {gate.values["status"] for gate in counters_in(change)} == {CounterState.CLOSED}
    for gate in counters_in(change):
        assert gate.guard.status_in == frozenset({CounterState.OPEN, CounterState.DRAINING})


def test_the_notice_is_inserted_in_the_change_that_completes_the_run() -> None:
    change = termination.complete(HOOKED, DONE, ALL_DONE, now=T0)

    notice = notice_in(change)
    assert notice.status is NoticeStatus.DUE
    assert notice.event_type == "run.completed"
    assert notice.notice_id == notice_id(RUN, "run.completed")
    assert (notice.occurred_at, notice.due_at) == (T0, T0)


def test_a_job_without_a_webhook_gets_no_notice() -> None:
    change = termination.complete(a_job(active_run_id=RUN), DONE, ALL_DONE, now=T0)

    assert _inserted(change, Notice) == []


def test_a_payload_describes_the_event_and_omits_absent_fields() -> None:
    payload = json.loads(notice_in(termination.complete(HOOKED, DONE, ALL_DONE, now=T0)).payload)

    assert payload == {
        "schema": "conveyor.webhook/v1",
        "event_id": notice_id(RUN, "run.completed"),
        "event_type": "run.completed",
        "occurred_at": "2023-11-14T22:13:20Z",
        "job_id": JOB,
        "external_id": "mine",
        "metadata": {"team": "a"},
        "run_id": RUN,
        "run_sequence": 1,
        "stats": {
            "total": 2,
            "completed": 2,
            "successful": 1,
            "failed": 1,
            "spend": {"credits": 3, "cost": 0.0},
            "failure_reasons": {"blocked": 1},
        },
    }


def test_requesting_a_stop_makes_all_counters_draining_and_keeps_the_status() -> None:
    change = termination.request_stop(DONE, reason="enough", now=T0 + 1)

    assert on_run(change).guard.status_in == lifecycle.RUN_LIVE
    assert on_run(change).values["stop_requested_at"] == T0 + 1
    assert on_run(change).values["stop_reason"] == "enough"
    assert {gate.values["status"] for gate in counters_in(change)} == {CounterState.DRAINING}
    assert len(counters_in(change)) == 2
    assert "status" not in on_run(change).values


def test_only_the_first_account_error_fails_a_run() -> None:
    change = termination.request_failure(DONE, RunFailure.INSUFFICIENT_CREDITS, "x" * 900, now=T0)

    assert on_run(change).guard.equals == (("stop_requested_at", None),)
    assert on_run(change).values["failure_reason"] is RunFailure.INSUFFICIENT_CREDITS
    assert len(on_run(change).values["failure_detail"]) == 500
    assert {gate.values["status"] for gate in counters_in(change)} == {CounterState.DRAINING}


def stopping(**fields: Any) -> Run:
    values = {"stop_requested_at": T0, "total": 2, "planned": 2, "last_batch_received": True}
    return a_run(**{**values, **fields})


def test_a_stop_with_unfinished_tasks_ends_as_stopped() -> None:
    run = stopping(stop_reason="enough")

    change = termination.finish_stop(HOOKED, run, Totals(admitted=2, done=1), now=T0)

    assert on_run(change).values["status"] is RunStatus.STOPPED
    assert json.loads(notice_in(change).payload)["stop_reason"] == "enough"
    assert notice_in(change).event_type == "run.stopped"


def test_a_stopping_run_whose_tasks_have_all_ended_completes() -> None:
    run = stopping(stop_reason="enough")

    change = termination.finish_stop(HOOKED, run, ALL_DONE, now=T0)

    assert on_run(change).values["status"] is RunStatus.COMPLETED
    assert notice_in(change).event_type == "run.completed"
    assert "stop_reason" not in json.loads(notice_in(change).payload)


def test_a_failing_run_whose_tasks_have_all_ended_completes_without_a_failure() -> None:
    run = stopping(failure_reason=RunFailure.INSUFFICIENT_CREDITS, failure_detail="none left")

    change = termination.finish_stop(HOOKED, run, ALL_DONE, now=T0)

    assert on_run(change).values["failure_reason"] is None
    assert on_run(change).values["failure_detail"] is None
    payload = json.loads(notice_in(change).payload)
    assert not {"failure_reason", "failure_detail"} & payload.keys()


def test_an_account_error_ends_the_run_as_failed_with_its_cause() -> None:
    run = stopping(failure_reason=RunFailure.SUBSCRIPTION_INACTIVE, failure_detail="lapsed")

    change = termination.finish_stop(HOOKED, run, Totals(admitted=2, done=1), now=T0)

    assert on_run(change).values["status"] is RunStatus.FAILED
    payload = json.loads(notice_in(change).payload)
    assert payload["event_type"] == "run.failed"
    assert payload["failure_reason"] == "subscription_inactive"
    assert payload["failure_detail"] == "lapsed"


def test_a_stop_of_an_open_job_does_not_complete_it() -> None:
    run = stopping(last_batch_received=False)

    change = termination.finish_stop(HOOKED, run, ALL_DONE, now=T0)

    assert on_run(change).values["status"] is RunStatus.STOPPED


def test_deleting_a_live_run_clears_the_active_run_and_closes_the_job() -> None:
    job = a_job(latest_run_id=RUN, active_run_id=RUN)

    change = termination.delete_run(job, DONE, next_latest=OTHER_RUN, intent_id="s", now=T0)

    assert on_run(change).values["status"] is RunStatus.DELETED
    assert on_job(change).values["latest_run_id"] == OTHER_RUN
    assert on_job(change).values["active_run_id"] is None
    assert on_job(change).values["status"] is JobStatus.CLOSED
    assert {gate.values["status"] for gate in counters_in(change)} == {CounterState.CLOSED}


def test_deleting_an_ended_run_keeps_the_active_run_of_the_job() -> None:
    job = a_job(latest_run_id=OTHER_RUN, active_run_id=OTHER_RUN)
    ended = a_run(status=RunStatus.COMPLETED, ended_at=T0)

    change = termination.delete_run(job, ended, next_latest=OTHER_RUN, intent_id="s", now=T0)

    assert on_job(change).values == {"updated_at": T0}
    assert counters_in(change) == []


def test_deleting_a_run_is_refused_if_the_job_has_another_active_run() -> None:
    job = a_job(latest_run_id=RUN, active_run_id=None)

    change = termination.delete_run(job, DONE, next_latest=None, intent_id="s", now=T0)

    assert set(on_job(change).guard.equals) == {("latest_run_id", RUN), ("active_run_id", None)}
    assert on_job(change).guard.status_in == frozenset({job.status})


@pytest.mark.parametrize("with_active", [True, False])
def test_deleting_a_job_leaves_a_tombstone_without_customer_data(with_active: bool) -> None:
    job = HOOKED
    change = termination.delete_job(job, DONE if with_active else None, intent_id="s", now=T0)

    values = on_job(change).values
    assert values["status"] is JobStatus.DELETED
    fields = {"job_id", "caller", "created_at", "format", "max_inflight", "max_attempts"}
    fields |= {"priority", "shard_count", "runs_count", "latest_run_id", "type"}
    fields |= {"result_ttl_days", "dedup", "priority", "shard_count", "runs_count", "latest_run_id"}
    assert values.keys() == set(Job.__struct_fields__) - fields
    assert not any(values[name] for name in values.keys() - {"status", "updated_at"})


@pytest.mark.parametrize("kind", list(JobType))
def test_deleting_a_scheduled_job_ends_its_schedule_in_the_same_change(kind: JobType) -> None:
    change = termination.delete_job(a_job(type=kind), None, intent_id="s", now=T0)

    is_ended = Delete(ScheduleKey(a_job().job_id)) in change.writes
    assert is_ended is (kind is JobType.SCHEDULED)


def test_deleting_a_job_closes_the_counters_of_its_live_run() -> None:
    change = termination.delete_job(HOOKED, DONE, intent_id="s", now=T0)

    assert on_run(change).guard.status_in == lifecycle.RUN_LIVE
    assert on_run(change).values["status"] is RunStatus.DELETED
    assert len(counters_in(change)) == 2
    assert on_job(change).guard.equals == (("active_run_id", RUN),)


@pytest.mark.parametrize("what", ["job", "run"])
def test_a_deletion_inserts_an_intent_of_two_passes(what: str) -> None:
    if what == "job":
        change = termination.delete_job(HOOKED, None, intent_id="s", now=T0)
    else:
        change = termination.delete_run(HOOKED, DONE, next_latest=None, intent_id="s", now=T0)

    (intent,) = _inserted(change, DeletionIntent)
    assert intent.passes_left == 2
    assert intent.due_at == T0
    assert intent.run_id == (None if what == "job" else RUN)


def test_closing_needs_an_open_job_and_a_live_run() -> None:
    change = termination.close(a_job(), a_run(), now=T0)

    assert on_job(change).guard.status_in == frozenset({JobStatus.OPEN})
    assert on_job(change).values["status"] is JobStatus.CLOSED
    assert on_run(change).guard.status_in == lifecycle.RUN_LIVE
    assert on_run(change).values["last_batch_received"] is True


def test_closing_a_job_whose_run_has_ended_changes_no_run() -> None:
    change = termination.close_ended(a_job(), now=T0)

    update, _ = change.writes
    assert isinstance(update, Update)
    assert update.guard.equals == (("active_run_id", None),)
    assert update.guard.status_in == frozenset({JobStatus.OPEN})
