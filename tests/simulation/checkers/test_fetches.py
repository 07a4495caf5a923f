"""Tests the checkers of fetches (I17, I29)."""

from __future__ import annotations

from conveyor.domain.model import RunStatus, TaskStatus
from conveyor.simulation.checkers.fetches import (
    a_claim_fetches_once,
    every_fetch_is_an_attempt,
    no_fetch_without_a_claim,
    no_job_is_fetched_beyond_its_cap,
)
from conveyor.simulation.client_history import History
from tests.builders import a_job, a_run, a_task
from tests.simulation.checkers.state_changes import a_fetch, change_to

TASK = a_task(status=TaskStatus.PROCESSING, claim=2)
ENDED = a_task(status=TaskStatus.SUCCESSFUL, claim=2, attempts=1, handed_back=1)


def test_a_fetch_under_a_claim_that_no_row_has_is_reported() -> None:
    change = change_to(TASK)

    assert list(no_fetch_without_a_claim(change, a_fetch(TASK.task_id, 3)))
    assert list(no_fetch_without_a_claim(change, a_fetch(TASK.task_id, 2))) == []


def test_two_fetches_under_one_claim_are_reported() -> None:
    first, second = a_fetch(TASK.task_id, 1), a_fetch(TASK.task_id, 2)

    assert list(a_claim_fetches_once(change_to(history=History(fetches=[first, first]))))
    assert list(a_claim_fetches_once(change_to(history=History(fetches=[first, second])))) == []


def test_a_fetch_beyond_the_attempts_is_reported_in_a_world_without_faults() -> None:
    fetches = [a_fetch(ENDED.task_id, claim) for claim in (1, 2, 3)]
    rows = (a_job(), a_run(status=RunStatus.COMPLETED), ENDED)

    def check(count: int, *, is_fault_free: bool) -> list[str]:
        history = History(fetches=fetches[:count], is_fault_free=is_fault_free)
        return [*every_fetch_is_an_attempt(change_to(*rows, history=history))]

    assert check(0, is_fault_free=True)
    assert check(1, is_fault_free=True) == []
    assert check(2, is_fault_free=True) == []  # The task was handed back once.
    assert check(3, is_fault_free=True)
    assert check(3, is_fault_free=False) == []


def test_more_fetches_at_once_than_the_cap_are_reported() -> None:
    rows = (a_job(max_inflight=1), a_run())
    fetches = [a_fetch(f"task{number}") for number in range(3)]

    def check(count: int, *, is_fault_free: bool) -> list[str]:
        history = History(fetches=fetches[:count], is_fault_free=is_fault_free)
        return [*no_job_is_fetched_beyond_its_cap(change_to(*rows, history=history), fetches[0])]

    assert check(1, is_fault_free=True) == []
    assert check(2, is_fault_free=True)
    assert check(2, is_fault_free=False) == []
    assert check(3, is_fault_free=False)


def test_an_ended_fetch_does_not_count_towards_the_cap() -> None:
    fetches = [a_fetch("task1", ended_at=2.0), a_fetch("task2")]
    history = History(fetches=fetches, is_fault_free=True)
    change = change_to(a_job(max_inflight=1), a_run(), history=history)

    assert list(no_job_is_fetched_beyond_its_cap(change, fetches[1])) == []
