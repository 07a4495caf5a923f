"""Tests the checkers of reasons, quotas, receipts, fairness, expiry (I54, I56, I57, I58, I64)."""

from __future__ import annotations

from conveyor.domain.ids import CallerId, JobId, RunId
from conveyor.domain.model import Problem, Result, RunStatus, TaskStatus
from conveyor.simulation.checkers.expiry import (
    GONE_WITHIN_S,
    an_expired_body_is_gone,
    an_expired_result_is_not_served,
)
from conveyor.simulation.checkers.fetches import every_success_keeps_its_body
from conveyor.simulation.checkers.idempotency import what_was_made_belongs_to_its_key
from conveyor.simulation.checkers.limits.fairness import (
    a_small_job_ends_soon_beside_hostile_callers,
)
from conveyor.simulation.checkers.limits.quotas import no_caller_exceeds_a_quota
from conveyor.simulation.checkers.reasons import no_failure_names_our_resources
from conveyor.simulation.checkers.receipts import a_stop_receipt_is_true
from conveyor.simulation.client_history import History
from tests.builders import JOB, RUN, T0, a_job, a_run, a_task
from tests.simulation.checkers.state_changes import a_call, a_fetch, change_to

OTHER_JOB = JobId(f"{JOB[:-1]}9")
TASK = a_task(status=TaskStatus.PROCESSING, claim=1)


def _failures_of(code: str, title: str) -> list[str]:
    problem = Problem(type=code, title=title, status=500, code=code)
    task = a_task(status=TaskStatus.FAILED, claim=1, attempts=1, problem=problem)
    return [*no_failure_names_our_resources(change_to(task, before=[TASK]))]


def test_a_task_that_fails_for_a_resource_of_the_worker_is_reported() -> None:
    assert _failures_of("storage_full", "No room for the page")
    assert _failures_of("dns_failed", "This worker is out of descriptors")
    assert _failures_of("gateway_502", "The request failed on its way") == []
    assert _failures_of("worker_crashed", "The worker crashed over this task") == []


def test_a_caller_that_exceeds_its_quota_by_more_than_one_is_reported() -> None:
    def check(jobs_count: int, **fields: object) -> list[str]:
        jobs = [
            a_job(job_id=JobId(f"{JOB[:-1]}{n}"), caller=CallerId("us"), active_run_id=RUN)
            for n in range(jobs_count)
        ]
        history = History(quotas={"live_runs": 2}, **fields)  # type: ignore[arg-type]
        return [*no_caller_exceeds_a_quota(change_to(*jobs, history=history))]

    assert check(4, is_isolated=True)
    assert check(3, is_isolated=True) == []
    assert check(4) == []  # In a world with faults a lost lease may admit several requests.


def _receipt(fetch_fields: dict[str, object], abandoned: int = 0, **fields: object) -> list[str]:
    receipt = {"complete": True, "inflight": 0, "leases": 0, "released": 1, "abandoned": abandoned}
    answer = {"run_id": RUN, "receipt": receipt}
    stop = a_call("POST", f"/v1/jobs/{JOB}/stop", answer=answer, at=5.0)
    fetch = a_fetch(TASK.task_id, 1, **fetch_fields)
    history = History(fetches=[fetch], **{"is_isolated": True, **fields})  # type: ignore[arg-type]
    return [*a_stop_receipt_is_true(change_to(history=history), stop)]


def test_a_receipt_without_fetches_in_flight_is_reported_while_one_is_open() -> None:
    assert _receipt({})
    assert _receipt({}, kills_count=1) == []
    assert _receipt({"ended_at": 5.0, "outcome": "Scraped"}) == []


def test_an_abandoned_call_that_is_missing_in_the_receipt_is_reported() -> None:
    cut_off: dict[str, object] = {"ended_at": 5.0, "is_at_gateway": True}

    assert _receipt(cut_off, has_gateway=True)
    assert _receipt(cut_off, abandoned=1, has_gateway=True) == []
    assert _receipt({**cut_off, "is_at_gateway": False}, has_gateway=True) == []
    assert _receipt(cut_off) == []


def test_a_small_job_is_reported_if_it_takes_over_twice_its_time_plus_five_seconds() -> None:
    def check(took_s: float, **fields: object) -> list[str]:
        runs = [
            a_run(job_id=job_id, run_id=RunId(job_id), created_at=T0, ended_at=T0 + seconds)
            for job_id, seconds in ((JOB, 2.0), (OTHER_JOB, took_s))
        ]
        history = History(small_jobs=[JOB, OTHER_JOB], **fields)  # type: ignore[arg-type]
        return [*a_small_job_ends_soon_beside_hostile_callers(change_to(*runs, history=history))]

    assert check(9.5, is_isolated=True)
    assert check(8.5, is_isolated=True) == []
    assert check(9.5) == []
    assert check(18.5, is_isolated=True, scan_s=10.0) == []
    assert check(19.5, is_isolated=True, scan_s=10.0)


def _expiries_after(seconds: float) -> list[str]:
    run = a_run(status=RunStatus.COMPLETED, expires_at=T0 - seconds)
    result = Result("body", 1, "", "text/html", 200)
    task = a_task(status=TaskStatus.SUCCESSFUL, claim=1, attempts=1, result=result)
    change = change_to(a_job(), run, task, bodies={"body": b"x"})
    content = a_call(path=f"/v1/jobs/{JOB}/runs/{RUN}/tasks/{task.task_id}/content")
    served = an_expired_result_is_not_served(change, content)
    return [
        violation
        for violations in (an_expired_body_is_gone(change), served)
        for violation in violations
    ]


def test_a_missing_body_is_reported_unless_clocks_leap_by_days() -> None:
    result = Result("body", 1, "", "text/html", 200)
    task = a_task(status=TaskStatus.SUCCESSFUL, claim=1, attempts=1, result=result)

    def check(*, leaps_days: bool) -> list[str]:
        history = History(leaps_days=leaps_days)
        return [*every_success_keeps_its_body(change_to(a_job(), a_run(), task, history=history))]

    assert check(leaps_days=False)
    assert check(leaps_days=True) == []


def test_a_job_without_an_idempotency_record_is_reported_unless_clocks_leap_by_days() -> None:
    def check(*, leaps_days: bool) -> list[str]:
        history = History(leaps_days=leaps_days)
        return [*what_was_made_belongs_to_its_key(change_to(a_job(), history=history))]

    assert check(leaps_days=False)
    assert check(leaps_days=True) == []


def test_a_result_that_is_served_or_stored_after_its_expiry_is_reported() -> None:
    assert len(_expiries_after(GONE_WITHIN_S + 1.0)) == 2
    assert (
        len(_expiries_after(GONE_WITHIN_S - 1.0)) == 1
    )  # The body is deleted a while after the expiry.
    assert _expiries_after(-1.0) == []
