"""Tests the checkers of accepted requests and their consequences (I1, I6, I35, I36, I44)."""

from __future__ import annotations

import json
from typing import Any

from conveyor.domain import limits
from conveyor.domain.ids import BatchId
from conveyor.domain.model import RunStatus
from conveyor.simulation.checkers.acceptance import (
    a_used_key_takes_no_other_request,
    an_accepted_job_completes_unless_stopped,
    an_accepted_job_is_durable,
    an_accepted_list_is_durable,
    one_key_makes_one_thing,
    only_what_has_ended_expires,
)
from conveyor.simulation.checkers.deletes import a_stopped_run_is_left_alone
from conveyor.simulation.checkers.execution import a_rerun_has_every_line
from conveyor.simulation.checkers.idempotency import an_expired_key_is_a_new_one
from conveyor.simulation.checkers.tenancy import (
    a_key_conflicts_only_for_its_caller,
    no_webhook_names_a_job_of_another_caller,
)
from conveyor.simulation.client_history import Call, History
from tests.builders import JOB, RUN, a_batch, a_job, a_run, a_task
from tests.simulation.checkers.state_changes import (
    OTHER_TENANT,
    TENANT,
    a_call,
    a_delivery,
    a_fetch,
    a_submit,
    change_to,
    with_lines,
)

LINE = "https://site1.example/a"
OTHER_LINE = "https://site1.example/b"
DAYS_S = 2.0 * limits.IDEMPOTENCY_TTL_S


def a_conflict(**fields: Any) -> Call:
    values = {"code": "idempotency_key_conflict"}
    return a_submit(LINE, **{"number": 2, "status": 409, "answer": values, **fields})


def an_addition(**fields: Any) -> Call:
    values = {"key": "key-1", "answer": {"accepted_tasks": 3}, **fields}
    return a_call("POST", f"/v1/jobs/{JOB}/tasks", **values)


def test_an_accepted_job_without_rows_is_reported() -> None:
    call = a_submit(LINE)

    assert list(an_accepted_job_is_durable(change_to(), call))
    assert list(an_accepted_job_is_durable(change_to(a_job()), call))
    assert (
        list(an_accepted_job_is_durable(change_to(a_job(), a_run(planned=1, total=1)), call)) == []
    )


def test_an_accepted_job_without_tasks_or_an_open_list_is_reported() -> None:
    lost, coming = (a_run(planned=1, open_batches=count) for count in (0, 1))

    assert list(an_accepted_job_is_durable(change_to(a_job(), lost), a_submit(LINE)))
    assert list(an_accepted_job_is_durable(change_to(a_job(), coming), a_submit(LINE))) == []


def test_an_accepted_rerun_without_rows_is_reported() -> None:
    again = a_submit(LINE, path=f"/v1/jobs/{JOB}/rerun?status=failed")
    run = a_run(planned=1, total=1)

    assert list(an_accepted_job_is_durable(change_to(a_job()), again))
    assert list(an_accepted_job_is_durable(change_to(a_job(), run), again)) == []


def test_an_added_list_without_a_batch_is_reported() -> None:
    rows = (a_job(), a_run(), a_batch(total=3))
    one, two = (an_addition(key=key) for key in ("key-1", "key-2"))
    first, second = (a_batch(batch_id=BatchId(batch_id), total=3) for batch_id in ("B1", "B2"))
    history = History(calls=[one, an_addition(key="key-1"), two])

    assert list(an_accepted_list_is_durable(change_to(*rows, first, history=history), two))
    both = change_to(*rows, first, second, history=history)
    assert list(an_accepted_list_is_durable(both, two)) == []


def test_an_added_list_with_too_few_lines_is_reported() -> None:
    short = a_batch(batch_id=BatchId("B1"), total=2)
    change = change_to(a_job(), a_run(), short, history=History(calls=[an_addition()]))

    assert list(an_accepted_list_is_durable(change, an_addition()))


def test_a_missing_run_is_reported_unless_clocks_leap_by_days() -> None:
    assert list(an_accepted_job_completes_unless_stopped(change_to(history=with_lines())))
    assert not list(
        an_accepted_job_completes_unless_stopped(change_to(history=with_lines(leaps_days=True)))
    )


def test_a_live_run_that_disappears_without_a_delete_is_reported() -> None:
    live, ended = a_run(), a_run(status=RunStatus.COMPLETED)
    deleted = History(calls=[a_call("DELETE", f"/v1/jobs/{JOB}", status=202)])

    assert list(only_what_has_ended_expires(change_to(before=[live])))
    assert list(
        only_what_has_ended_expires(change_to(a_run(status=RunStatus.DELETED), before=[live]))
    )
    assert not list(only_what_has_ended_expires(change_to(before=[ended])))
    assert not list(only_what_has_ended_expires(change_to(before=[live], history=deleted)))


def test_a_run_that_failed_without_a_cause_is_reported() -> None:
    rows = (a_job(), a_run(status=RunStatus.FAILED))

    assert list(an_accepted_job_completes_unless_stopped(change_to(*rows, history=with_lines())))
    assert not list(
        an_accepted_job_completes_unless_stopped(
            change_to(*rows, history=with_lines(spent_count=1))
        )
    )


def test_two_different_answers_to_one_key_are_reported() -> None:
    first, same = a_submit(LINE), a_submit(LINE, number=2)
    other = a_submit(LINE, number=3, answer={"job_id": "ANOTHER"})
    change = change_to(history=History(calls=[first, same]))

    assert list(one_key_makes_one_thing(change, same)) == []
    assert list(one_key_makes_one_thing(change, other))


def test_another_request_that_is_accepted_with_a_used_key_is_reported() -> None:
    first, same, other = a_submit(LINE), a_submit(LINE, number=2), a_submit(OTHER_LINE, number=3)
    change = change_to(history=History(calls=[first, same, other]))

    assert list(a_used_key_takes_no_other_request(change, same)) == []
    assert list(a_used_key_takes_no_other_request(change, other))


def test_a_replay_or_conflict_of_an_expired_key_is_reported() -> None:
    first = a_submit(LINE)
    replayed, refused = a_submit(LINE, number=2, at=DAYS_S), a_conflict(at=DAYS_S)
    anew = a_submit(LINE, number=2, at=DAYS_S, answer={"job_id": "ANOTHER"})
    change = change_to(history=History(calls=[first]))

    assert list(an_expired_key_is_a_new_one(change, replayed))
    assert list(an_expired_key_is_a_new_one(change, refused))
    assert list(an_expired_key_is_a_new_one(change, anew)) == []
    assert list(an_expired_key_is_a_new_one(change, a_submit(LINE, number=2, at=60.0))) == []


def test_an_expired_key_may_be_used_for_another_request() -> None:
    anew = a_submit(OTHER_LINE, number=2, at=DAYS_S, answer={"job_id": "ANOTHER"})
    change = change_to(history=History(calls=[a_submit(LINE), anew]))

    assert list(one_key_makes_one_thing(change, anew)) == []
    assert list(a_used_key_takes_no_other_request(change, anew)) == []


def test_a_conflict_with_the_key_of_another_tenant_is_reported() -> None:
    conflict = a_conflict()
    of_another = [a_submit(OTHER_LINE, tenant=OTHER_TENANT), conflict]
    of_its_own = [a_submit(OTHER_LINE), conflict]

    assert list(
        a_key_conflicts_only_for_its_caller(change_to(history=History(calls=of_another)), conflict)
    )
    assert not list(
        a_key_conflicts_only_for_its_caller(change_to(history=History(calls=of_its_own)), conflict)
    )


def test_a_webhook_to_the_receiver_of_another_tenant_is_reported() -> None:
    url = "https://tenant0.hooks.example/1"
    delivery = a_delivery(url=url, body=json.dumps({"job_id": JOB, "run_id": RUN}).encode())
    request, of_another = (
        a_submit(LINE, body={"webhook": {"url": url}}, tenant=tenant)
        for tenant in (TENANT, OTHER_TENANT)
    )

    for call, is_wrong in ((request, False), (of_another, True)):
        change = change_to(a_job(), a_run(), history=with_lines(calls=[call]))
        assert bool(list(no_webhook_names_a_job_of_another_caller(change, delivery))) == is_wrong


def test_a_webhook_that_names_another_job_is_reported() -> None:
    body = json.dumps({"job_id": "ANOTHER", "run_id": RUN}).encode()
    change = change_to(a_job(), a_run())

    assert list(no_webhook_names_a_job_of_another_caller(change, a_delivery(body=body)))


def test_a_fetch_long_after_the_stop_of_its_run_is_reported() -> None:
    change = change_to(history=History(stopped_runs={RUN: 10.0}))

    assert list(a_stopped_run_is_left_alone(change, a_fetch("task", started_at=1000.0)))
    assert list(a_stopped_run_is_left_alone(change, a_fetch("task", started_at=11.0))) == []


def test_a_completed_run_with_fewer_tasks_than_promised_is_reported() -> None:
    rows = (a_job(), a_run(status=RunStatus.COMPLETED), a_task(0))

    assert list(a_rerun_has_every_line(change_to(*rows, history=with_lines(2))))
    assert list(a_rerun_has_every_line(change_to(*rows, a_task(1), history=with_lines(2)))) == []


def test_a_call_without_a_key_is_accepted() -> None:
    assert list(a_key_conflicts_only_for_its_caller(change_to(), a_call())) == []
