"""Tests the checkers of budgets, hosts, schedules and paid calls (I51, I52, I55, I60, I65)."""

from __future__ import annotations

import msgspec

from conveyor.domain.budget import Budget, BudgetCap, BudgetReservation, Unit
from conveyor.domain.model import (
    Attempt,
    HostLimit,
    HostLimits,
    Problem,
    Result,
    RunStatus,
    TaskStatus,
)
from conveyor.domain.schedule import Skip, SkipReason
from conveyor.simulation.checkers.deletes import nothing_is_left_of_a_deleted_run
from conveyor.simulation.checkers.fetches import every_body_answers_its_own_request
from conveyor.simulation.checkers.limits.budget import (
    a_budget_adds_up_to_its_cap,
    every_paid_call_is_on_record,
    no_run_spends_above_its_cap,
    no_spend_exceeds_the_bill,
    no_task_fails_for_an_outage,
    paid_calls_per_task_are_bounded,
)
from conveyor.simulation.checkers.limits.hosts import no_host_is_fetched_beyond_its_limits
from conveyor.simulation.checkers.schedule import (
    a_nominal_time_makes_one_run,
    no_nominal_time_is_left_out,
)
from conveyor.simulation.checkers.webhooks import an_event_is_redelivered_for_its_owner
from conveyor.simulation.client_history import Fetch, History
from tests.builders import JOB, RUN, T0, a_batch, a_job, a_notice, a_run, a_schedule, a_task
from tests.simulation.checkers.state_changes import (
    OTHER_TENANT,
    TENANT,
    a_call,
    a_delivery,
    a_fetch,
    change_to,
    with_lines,
)

COMPLETED = a_run(status=RunStatus.COMPLETED)
TASK = a_task(status=TaskStatus.PROCESSING, claim=2)


def test_a_page_that_is_fetched_twice_in_an_orderly_world_is_reported() -> None:
    page, again = a_fetch(TASK.task_id, 1, outcome="Scraped"), a_fetch(TASK.task_id, 2)

    def check(**fields: object) -> list[str]:
        history = History(fetches=[page, again], **fields)  # type: ignore[arg-type]
        return [*paid_calls_per_task_are_bounded(change_to(TASK, history=history), again)]

    assert check(is_isolated=True)
    assert check(is_isolated=True, kills_count=1) == []
    assert check() == []


def test_a_page_that_is_fetched_ten_times_is_reported_in_any_world() -> None:
    pages = [a_fetch(TASK.task_id, claim, outcome="Scraped") for claim in range(1, 10)]
    again = a_fetch(TASK.task_id, 10)
    history = History(fetches=[*pages, again])

    assert list(paid_calls_per_task_are_bounded(change_to(TASK, history=history), again))


def test_a_billed_page_that_is_not_on_record_is_reported() -> None:
    attempt = Attempt(number=1, started_at=T0, ended_at=T0, credits=1)
    task = a_task(status=TaskStatus.SUCCESSFUL, claim=1, attempts=1, credits=1, history=(attempt,))

    def check(billed: int, **fields: object) -> list[str]:
        fetch = a_fetch(task.task_id, 1, outcome="Scraped", credits_billed=billed)
        history = History(fetches=[fetch], has_gateway=True, **fields)  # type: ignore[arg-type]
        change = change_to(a_job(), COMPLETED, task, history=history)
        return [
            *every_paid_call_is_on_record(change),
            *no_spend_exceeds_the_bill(change),
        ]

    assert check(1, is_isolated=True) == []
    assert check(2, is_isolated=True)
    assert check(2) == []
    assert check(0)


def test_a_failed_attempt_without_a_fault_of_its_site_is_reported() -> None:
    problem = _problem("gateway_unreachable")
    task = a_task(status=TaskStatus.FAILED, claim=1, attempts=1, problem=problem)

    def check(**fields: int) -> list[str]:
        history = History(fetches=[a_fetch(task.task_id, 1, **fields)])
        return [*no_task_fails_for_an_outage(change_to(a_job(), COMPLETED, task, history=history))]

    assert check(outage_faults=1)
    assert check(site_faults=1) == []


def test_a_task_that_lost_its_workers_may_fail_without_a_fault_of_its_site() -> None:
    problem = _problem("worker_lost")
    attempt = Attempt(number=1, started_at=T0, ended_at=T0, problem=problem)
    task = a_task(
        status=TaskStatus.FAILED, claim=4, attempts=1, problem=problem, history=(attempt,)
    )

    assert list(no_task_fails_for_an_outage(change_to(a_job(), COMPLETED, task))) == []


def test_an_attempt_that_crashed_its_handler_may_fail_without_a_fault_of_its_site() -> None:
    crashed, not_found = _problem("worker_crashed"), _problem("target_404")
    history = tuple(
        Attempt(number=number, started_at=T0, ended_at=T0, problem=problem)
        for number, problem in enumerate((crashed, not_found), start=1)
    )
    task = a_task(status=TaskStatus.FAILED, claim=2, attempts=2, problem=not_found, history=history)
    page, refusal = a_fetch(task.task_id, 1), a_fetch(task.task_id, 2, site_faults=1)

    def check(*fetches: Fetch) -> list[str]:
        change = change_to(a_job(), COMPLETED, task, history=History(fetches=list(fetches)))
        return list(no_task_fails_for_an_outage(change))

    assert check(page, refusal) == []
    assert check(page)


def test_a_body_that_answers_another_request_is_reported() -> None:
    task = a_task(status=TaskStatus.SUCCESSFUL, claim=2, attempts=1, result=_result())
    own = f"{task.run_id}-{task.task_id}-2 {task.url}\npage".encode()

    def check(body: bytes) -> list[str]:
        return [*every_body_answers_its_own_request(change_to(task, bodies={"body.2": body}))]

    assert check(own) == []
    assert check(b"") == []  # The site sent an empty page.
    assert check(own.replace(b"-2 ", b"-1 "))
    assert check(own.replace(task.url.encode(), b"https://another.example/"))


def _problem(code: str) -> Problem:
    return Problem(type=f"urn:conveyor:problem:{code}", title="no", status=502, code=code)


def _result() -> Result:
    return Result("body.2", 4, "digest", "text/html", 200)


def test_a_budget_that_does_not_add_up_is_reported() -> None:
    run = a_run(budget=BudgetCap(Unit.CREDITS, 10))

    def check(left: int, taken: int) -> list[str]:
        budget = Budget(JOB, RUN, Unit.CREDITS, 10, left)
        share = BudgetReservation(JOB, RUN, "holder", taken, 1)
        return [*a_budget_adds_up_to_its_cap(change_to(a_job(), run, budget, share))]

    assert check(4, 6) == []
    assert check(4, 7)
    assert check(-1, 11)


def test_a_bill_above_the_budget_is_reported() -> None:
    budget = Budget(JOB, RUN, Unit.CREDITS, 2, 0)

    def check(pages: int) -> list[str]:
        history = History(fetches=[a_fetch("task", 1, credits_billed=1)] * pages)
        return [*no_run_spends_above_its_cap(change_to(budget, history=history))]

    assert check(2) == []
    assert check(3)


def test_more_fetches_of_a_host_than_its_limits_are_reported() -> None:
    tasks = [a_task(n, url="https://slow.example/") for n in range(4)]

    def check(limit: HostLimit, count: int, *, is_fault_free: bool = True) -> list[str]:
        job = a_job(host_limits=HostLimits(limit))
        fetches = [a_fetch(task.task_id) for task in tasks[:count]]
        history = History(fetches=fetches, is_fault_free=is_fault_free)
        change = change_to(job, a_run(), *tasks, history=history)
        return [*no_host_is_fetched_beyond_its_limits(change, fetches[-1])]

    assert check(HostLimit(concurrency=1), 1) == []
    assert check(HostLimit(concurrency=1), 2)
    assert check(HostLimit(concurrency=1), 2, is_fault_free=False) == []
    assert check(HostLimit(concurrency=1), 3, is_fault_free=False)
    assert check(HostLimit(rate_per_s=0.1), 2) == []
    assert check(HostLimit(rate_per_s=0.1), 4)


def test_two_runs_of_one_nominal_time_are_reported() -> None:
    first = a_run(scheduled_for=T0)
    second = msgspec.structs.replace(first, run_id="01HF0000000000000000000009")

    assert list(a_nominal_time_makes_one_run(change_to(first))) == []
    assert list(a_nominal_time_makes_one_run(change_to(first, second, before=[first])))


def test_a_nominal_time_without_run_or_skip_is_reported() -> None:
    waiting = a_schedule(next_fire_at=T0)
    moved_on = msgspec.structs.replace(waiting, next_fire_at=T0 + 60.0)
    skipped = msgspec.structs.replace(moved_on, skips=(Skip(T0, T0, SkipReason.MISSED),))
    fault_counts = a_run(scheduled_for=T0)

    assert list(no_nominal_time_is_left_out(change_to(moved_on, before=[waiting])))
    assert list(no_nominal_time_is_left_out(change_to(skipped, before=[waiting]))) == []
    assert (
        list(no_nominal_time_is_left_out(change_to(moved_on, fault_counts, before=[waiting]))) == []
    )


def test_a_body_or_row_of_a_deleted_run_is_reported() -> None:
    deleted = a_call("DELETE", f"/v1/jobs/{JOB}/runs/{RUN}", status=202)

    def check(**fields: object) -> list[str]:
        history = History(calls=[deleted])
        change = change_to(a_job(), history=history, **fields)  # type: ignore[arg-type]
        return [*nothing_is_left_of_a_deleted_run(change)]

    assert check() == []
    assert check(bodies={f"jobs/{JOB}/runs/{RUN}/body": b""})
    change = change_to(a_batch(), history=History(calls=[deleted]))
    assert list(nothing_is_left_of_a_deleted_run(change))


def test_a_second_delivery_is_reported_unless_its_owner_requested_it() -> None:
    notice = a_notice()
    first, again = (a_delivery(notice.notice_id, at=at) for at in (1.0, 9.0))
    path = f"/v1/jobs/{JOB}/webhook/deliveries/{notice.notice_id}/redeliver"

    def check(*tenants: str) -> list[str]:
        history = with_lines(deliveries=[first, again], is_fault_free=True)
        history.calls = [a_call("POST", path, tenant=tenant) for tenant in tenants]
        return [*an_event_is_redelivered_for_its_owner(change_to(notice, history=history), again)]

    assert check()
    assert check(OTHER_TENANT)
    assert check(TENANT) == []
