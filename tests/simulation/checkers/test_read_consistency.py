"""Tests the checkers of reads (I22, I28, I39)."""

from __future__ import annotations

from typing import Any

from conveyor.simulation.checkers.read_consistency import (
    a_run_with_open_lists_is_not_pending,
    an_end_that_was_shown_stays,
    counts_that_were_shown_never_fall,
    what_was_accepted_is_found,
)
from conveyor.simulation.client_history import Call, Delivery, History
from tests.builders import JOB, RUN
from tests.simulation.checkers.state_changes import (
    a_call,
    a_delivery,
    change_to,
    with_lines,
)


def a_read(status: str, at: float, **fields: Any) -> Call:
    body = {"job_id": JOB, "latest_run": {"run_id": RUN, "status": status, **fields}}
    return a_call(answer=body, at=at)


def stays(*calls: Call, deliveries: tuple[Delivery, ...] = ()) -> list[str]:
    history = History(calls=[*calls], deliveries=[*deliveries])
    return [*an_end_that_was_shown_stays(change_to(history=history))]


def test_a_run_that_is_shown_running_after_its_end_is_reported() -> None:
    assert stays(a_read("completed", 1.0), a_read("running", 2.0))
    assert stays(a_read("running", 1.0), a_read("completed", 2.0)) == []


def test_a_run_with_two_different_end_statuses_is_reported() -> None:
    assert stays(a_read("completed", 1.0), a_read("stopped", 2.0))
    assert stays(a_read("completed", 1.0), a_read("completed", 2.0)) == []


def test_a_run_that_is_shown_running_after_the_webhook_of_its_end_is_reported() -> None:
    assert stays(a_read("running", 2.0), deliveries=(a_delivery(at=1.0),))
    assert stays(a_read("running", 2.0), deliveries=(a_delivery(at=3.0),)) == []


def test_a_read_that_began_before_the_end_was_shown_may_show_the_run_running() -> None:
    slow = a_read("running", 3.0)
    slow.sent_at = 1.0

    assert stays(a_read("completed", 2.0), slow) == []


def counted(completed: int, at: float) -> Call:
    stats = {"completed": completed, "successful": completed, "failed": 0}
    return a_read("running", at, stats=stats)


def falls_in(*calls: Call) -> list[str]:
    history = History(calls=[*calls])
    return [*counts_that_were_shown_never_fall(change_to(history=history))]


def test_decreasing_counts_are_reported() -> None:
    assert falls_in(counted(5, 1.0), counted(4, 3.0))
    assert falls_in(counted(5, 1.0), counted(5, 3.0), counted(6, 3.0)) == []


def test_counts_may_be_a_second_old() -> None:
    slow = counted(4, 9.0)
    slow.sent_at = 1.5

    assert falls_in(counted(5, 1.0), counted(4, 1.9)) == []
    assert falls_in(counted(5, 1.0), slow) == []


def test_a_run_that_is_shown_idle_during_its_ingest_is_reported() -> None:
    idle = a_read("pending", 1.0, ingest_status="pending")
    at_work = a_read("running", 1.0, ingest_status="pending")

    assert list(a_run_with_open_lists_is_not_pending(change_to(), idle))
    assert list(a_run_with_open_lists_is_not_pending(change_to(), at_work)) == []


def test_a_404_for_an_accepted_job_is_reported_unless_its_delete_was_requested() -> None:
    missed = a_call(status=404)
    history = with_lines()

    assert list(what_was_accepted_is_found(change_to(history=history), missed))

    history.calls.append(a_call("DELETE"))
    assert list(what_was_accepted_is_found(change_to(history=history), missed)) == []
