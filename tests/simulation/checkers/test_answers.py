"""The checkers of answers and of what follows from them (I1, I6, I35, I36, I44)."""

from __future__ import annotations

import json
from typing import Any

from conveyor.domain import limits
from conveyor.domain.ids import BatchId
from conveyor.domain.model import RunStatus
from conveyor.simulation.checkers.acceptance import (
    a_promise_is_kept_or_withdrawn,
    a_used_key_takes_no_other_request,
    an_accepted_job_is_durable,
    an_accepted_list_is_durable,
    one_key_makes_one_thing,
    only_what_has_ended_expires,
)
from conveyor.simulation.checkers.deletes import a_stopped_run_is_left_alone
from conveyor.simulation.checkers.execution import a_rerun_has_every_line
from conveyor.simulation.checkers.idempotency import an_expired_key_is_a_new_one
from conveyor.simulation.checkers.tenancy import (
    a_key_is_its_callers_own,
    nobody_is_told_of_what_is_anothers,
)
from conveyor.simulation.client_history import Call, History
from tests.builders import JOB, RUN, a_batch, a_job, a_run, a_task
from tests.simulation.checkers.state_changes import (
    OTHER_TENANT,
    TENANT,
    a_call,
    a_delivery,
    a_fetch,
    a_moment,
    a_submit,
    promising,
)

LINE = "https://site1.example/a"
OTHER_LINE = "https://site1.example/b"
DAYS_S = 2.0 * limits.IDEMPOTENCY_TTL_S


def a_conflict(**fields: Any) -> Call:
    said = {"code": "idempotency_key_conflict"}
    return a_submit(LINE, **{"number": 2, "status": 409, "answer": said, **fields})


def an_addition(**fields: Any) -> Call:
    said = {"key": "key-1", "answer": {"accepted_tasks": 3}, **fields}
    return a_call("POST", f"/v1/jobs/{JOB}/tasks", **said)


def test_an_answer_for_which_there_are_no_rows_is_reported() -> None:
    call = a_submit(LINE)

    assert list(an_accepted_job_is_durable(a_moment(), call))
    assert list(an_accepted_job_is_durable(a_moment(a_job()), call))
    assert (
        list(an_accepted_job_is_durable(a_moment(a_job(), a_run(planned=1, total=1)), call)) == []
    )


def test_an_answer_for_which_no_list_is_on_its_way_is_reported() -> None:
    lost, coming = (a_run(planned=1, open_batches=count) for count in (0, 1))

    assert list(an_accepted_job_is_durable(a_moment(a_job(), lost), a_submit(LINE)))
    assert list(an_accepted_job_is_durable(a_moment(a_job(), coming), a_submit(LINE))) == []


def test_a_rerun_for_which_there_are_no_rows_is_reported() -> None:
    again = a_submit(LINE, path=f"/v1/jobs/{JOB}/rerun?status=failed")
    run = a_run(planned=1, total=1)

    assert list(an_accepted_job_is_durable(a_moment(a_job()), again))
    assert list(an_accepted_job_is_durable(a_moment(a_job(), run), again)) == []


def test_an_added_list_that_is_not_there_is_reported() -> None:
    rows = (a_job(), a_run(), a_batch(total=3))
    one, two = (an_addition(key=key) for key in ("key-1", "key-2"))
    first, second = (a_batch(batch_id=BatchId(batch_id), total=3) for batch_id in ("B1", "B2"))
    history = History(calls=[one, an_addition(key="key-1"), two])

    assert list(an_accepted_list_is_durable(a_moment(*rows, first, history=history), two))
    both = a_moment(*rows, first, second, history=history)
    assert list(an_accepted_list_is_durable(both, two)) == []


def test_an_added_list_of_which_fewer_lines_are_there_is_reported() -> None:
    short = a_batch(batch_id=BatchId("B1"), total=2)
    moment = a_moment(a_job(), a_run(), short, history=History(calls=[an_addition()]))

    assert list(an_accepted_list_is_durable(moment, an_addition()))


def test_a_run_that_is_gone_is_reported_unless_clocks_are_weeks_apart() -> None:
    assert list(a_promise_is_kept_or_withdrawn(a_moment(history=promising())))
    assert not list(a_promise_is_kept_or_withdrawn(a_moment(history=promising(leaps_days=True))))


def test_a_live_run_that_is_removed_by_nobody_is_reported() -> None:
    live, ended = a_run(), a_run(status=RunStatus.COMPLETED)
    deleted = History(calls=[a_call("DELETE", f"/v1/jobs/{JOB}", status=202)])

    assert list(only_what_has_ended_expires(a_moment(before=[live])))
    assert list(
        only_what_has_ended_expires(a_moment(a_run(status=RunStatus.DELETED), before=[live]))
    )
    assert not list(only_what_has_ended_expires(a_moment(before=[ended])))
    assert not list(only_what_has_ended_expires(a_moment(before=[live], history=deleted)))


def test_a_run_that_failed_for_no_reason_is_reported() -> None:
    rows = (a_job(), a_run(status=RunStatus.FAILED))

    assert list(a_promise_is_kept_or_withdrawn(a_moment(*rows, history=promising())))
    assert not list(
        a_promise_is_kept_or_withdrawn(a_moment(*rows, history=promising(spent_count=1)))
    )


def test_two_answers_under_one_key_are_reported() -> None:
    first, same = a_submit(LINE), a_submit(LINE, number=2)
    other = a_submit(LINE, number=3, answer={"job_id": "ANOTHER"})
    moment = a_moment(history=History(calls=[first, same]))

    assert list(one_key_makes_one_thing(moment, same)) == []
    assert list(one_key_makes_one_thing(moment, other))


def test_a_request_that_is_accepted_under_the_key_of_another_is_reported() -> None:
    first, same, other = a_submit(LINE), a_submit(LINE, number=2), a_submit(OTHER_LINE, number=3)
    moment = a_moment(history=History(calls=[first, same, other]))

    assert list(a_used_key_takes_no_other_request(moment, same)) == []
    assert list(a_used_key_takes_no_other_request(moment, other))


def test_an_expired_key_that_is_still_in_force_is_reported() -> None:
    first = a_submit(LINE)
    replayed, refused = a_submit(LINE, number=2, at=DAYS_S), a_conflict(at=DAYS_S)
    anew = a_submit(LINE, number=2, at=DAYS_S, answer={"job_id": "ANOTHER"})
    moment = a_moment(history=History(calls=[first]))

    assert list(an_expired_key_is_a_new_one(moment, replayed))
    assert list(an_expired_key_is_a_new_one(moment, refused))
    assert list(an_expired_key_is_a_new_one(moment, anew)) == []
    assert list(an_expired_key_is_a_new_one(moment, a_submit(LINE, number=2, at=60.0))) == []


def test_what_was_done_under_an_expired_key_is_no_first_answer() -> None:
    anew = a_submit(OTHER_LINE, number=2, at=DAYS_S, answer={"job_id": "ANOTHER"})
    moment = a_moment(history=History(calls=[a_submit(LINE), anew]))

    assert list(one_key_makes_one_thing(moment, anew)) == []
    assert list(a_used_key_takes_no_other_request(moment, anew)) == []


def test_a_key_that_conflicts_with_what_somebody_else_did_is_reported() -> None:
    conflict = a_conflict()
    of_another = [a_submit(OTHER_LINE, tenant=OTHER_TENANT), conflict]
    of_its_own = [a_submit(OTHER_LINE), conflict]

    assert list(a_key_is_its_callers_own(a_moment(history=History(calls=of_another)), conflict))
    assert not list(a_key_is_its_callers_own(a_moment(history=History(calls=of_its_own)), conflict))


def test_a_webhook_that_goes_to_somebody_else_is_reported() -> None:
    url = "https://tenant0.hooks.example/1"
    delivery = a_delivery(url=url, body=json.dumps({"job_id": JOB, "run_id": RUN}).encode())
    request, of_another = (
        a_submit(LINE, body={"webhook": {"url": url}}, tenant=tenant)
        for tenant in (TENANT, OTHER_TENANT)
    )

    for call, is_wrong in ((request, False), (of_another, True)):
        moment = a_moment(a_job(), a_run(), history=promising(calls=[call]))
        assert bool(list(nobody_is_told_of_what_is_anothers(moment, delivery))) == is_wrong


def test_a_webhook_that_names_another_job_is_reported() -> None:
    body = json.dumps({"job_id": "ANOTHER", "run_id": RUN}).encode()
    moment = a_moment(a_job(), a_run())

    assert list(nobody_is_told_of_what_is_anothers(moment, a_delivery(body=body)))


def test_a_fetch_long_after_a_stop_is_reported() -> None:
    moment = a_moment(history=History(stopped_runs={RUN: 10.0}))

    assert list(a_stopped_run_is_left_alone(moment, a_fetch("task", started_at=1000.0)))
    assert list(a_stopped_run_is_left_alone(moment, a_fetch("task", started_at=11.0))) == []


def test_a_completed_run_with_fewer_tasks_than_promised_is_reported() -> None:
    rows = (a_job(), a_run(status=RunStatus.COMPLETED), a_task(0))

    assert list(a_rerun_has_every_line(a_moment(*rows, history=promising(2))))
    assert list(a_rerun_has_every_line(a_moment(*rows, a_task(1), history=promising(2)))) == []


def test_a_call_without_a_key_conflicts_with_nobody() -> None:
    assert list(a_key_is_its_callers_own(a_moment(), a_call())) == []
