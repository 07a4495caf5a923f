"""The checkers of what is shown: I22, I28, I39."""

from __future__ import annotations

from typing import Any

from conveyor.simulation.checkers.read_consistency import (
    a_run_at_work_is_not_idle,
    an_end_that_was_shown_stays,
    counts_that_were_shown_never_fall,
    what_was_accepted_is_found,
)
from conveyor.simulation.client_history import Call, Delivery, History
from tests.builders import JOB, RUN
from tests.simulation.checkers.state_changes import a_call, a_delivery, a_moment, promising


def a_read(status: str, at: float, **fields: Any) -> Call:
    body = {"job_id": JOB, "latest_run": {"run_id": RUN, "status": status, **fields}}
    return a_call(answer=body, at=at)


def stays(*calls: Call, deliveries: tuple[Delivery, ...] = ()) -> list[str]:
    history = History(calls=[*calls], deliveries=[*deliveries])
    return [*an_end_that_was_shown_stays(a_moment(history=history))]


def test_a_run_that_works_after_it_was_shown_to_have_ended_is_reported() -> None:
    assert stays(a_read("completed", 1.0), a_read("running", 2.0))
    assert stays(a_read("running", 1.0), a_read("completed", 2.0)) == []


def test_a_run_that_ended_in_two_ways_is_reported() -> None:
    assert stays(a_read("completed", 1.0), a_read("stopped", 2.0))
    assert stays(a_read("completed", 1.0), a_read("completed", 2.0)) == []


def test_a_run_that_works_after_a_webhook_told_of_its_end_is_reported() -> None:
    assert stays(a_read("running", 2.0), deliveries=(a_delivery(at=1.0),))
    assert stays(a_read("running", 2.0), deliveries=(a_delivery(at=3.0),)) == []


def test_who_asked_before_an_end_was_shown_may_still_see_it_work() -> None:
    slow = a_read("running", 3.0)
    slow.sent_at = 1.0

    assert stays(a_read("completed", 2.0), slow) == []


def counted(completed: int, at: float) -> Call:
    stats = {"completed": completed, "successful": completed, "failed": 0}
    return a_read("running", at, stats=stats)


def falls_in(*calls: Call) -> list[str]:
    history = History(calls=[*calls])
    return [*counts_that_were_shown_never_fall(a_moment(history=history))]


def test_counts_that_fall_are_reported() -> None:
    assert falls_in(counted(5, 1.0), counted(4, 3.0))
    assert falls_in(counted(5, 1.0), counted(5, 3.0), counted(6, 3.0)) == []


def test_counts_may_be_a_second_old() -> None:
    slow = counted(4, 9.0)
    slow.sent_at = 1.5

    assert falls_in(counted(5, 1.0), counted(4, 1.9)) == []
    assert falls_in(counted(5, 1.0), slow) == []


def test_a_run_that_is_shown_idle_while_its_list_comes_in_is_reported() -> None:
    idle = a_read("pending", 1.0, ingest_status="pending")
    at_work = a_read("running", 1.0, ingest_status="pending")

    assert list(a_run_at_work_is_not_idle(a_moment(), idle))
    assert list(a_run_at_work_is_not_idle(a_moment(), at_work)) == []


def test_a_job_that_its_owner_does_not_find_is_reported_unless_it_was_to_be_deleted() -> None:
    missed = a_call(status=404)
    history = promising()

    assert list(what_was_accepted_is_found(a_moment(history=history), missed))

    history.calls.append(a_call("DELETE"))
    assert list(what_was_accepted_is_found(a_moment(history=history), missed)) == []
