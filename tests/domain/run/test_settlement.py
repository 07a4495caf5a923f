"""Claims fence writes, counters move with their tasks, and counter states decide which settles
pass."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest

from conveyor.domain import errors, limits
from conveyor.domain.changes import Applied, Change, Missing, SettleChange, Stale, Update
from conveyor.domain.damage import DamagedTask
from conveyor.domain.lifecycle import RELEASES_PASS, SETTLES_PASS, TASK_TERMINAL
from conveyor.domain.model import Attempt, CounterState, FailureReason, Result, Task, TaskStatus
from conveyor.domain.run import settlement
from conveyor.domain.run.settlement import (
    AlreadyDone,
    Claimed,
    Cost,
    HeldByOther,
    LostClaim,
    NoSuchTask,
    RunClosed,
    Settled,
)
from tests.builders import T0, a_stats, a_task, key_of, ref_to

RESULT = Result("jobs/j/runs/r/t/4", 10, "00", "text/html", 200)
PROBLEM = errors.make_problem("blocked", "Blocked", 403)
FREE = Cost()


def a_claimed_task(**fields: Any) -> Task:
    started: dict[str, Any] = {"claim": 4, "attempts": 2, "started_at": T0, "claim_until": T0 + 90}
    return a_task(status=TaskStatus.PROCESSING, **{**started, **fields})


def updates_of(change: Change) -> tuple[Update, Update]:
    flip, count = change.writes
    assert isinstance(flip, Update)
    assert isinstance(count, Update)
    return flip, count


def test_only_pending_tasks_and_lapsed_claims_can_be_claimed() -> None:
    change = settlement.claim(ref_to(a_task()), now=T0)

    (update,) = change.writes
    assert isinstance(update, Update)
    assert update.guard.status_in == frozenset({TaskStatus.PENDING, TaskStatus.PROCESSING})
    assert update.guard.lapsed == ("claim_until", T0)
    assert update.values["status"] is TaskStatus.PROCESSING
    assert update.values["claim_until"] == T0 + limits.CLAIM_TTL_S


def test_a_claim_increments_the_claim_number_but_no_attempt() -> None:
    (update,) = settlement.claim(ref_to(a_task()), now=T0).writes

    assert isinstance(update, Update)
    assert update.deltas == {"claim": 1}


def test_an_applied_claim_returns_the_written_row() -> None:
    task = a_claimed_task()

    assert settlement.claim_result(Applied((task,)), now=T0) == Claimed(task)


@pytest.mark.parametrize("status", sorted(TASK_TERMINAL))
def test_a_claim_of_a_terminal_task_finds_it_already_done(status: TaskStatus) -> None:
    row = a_task(status=status)

    assert settlement.claim_result(Stale(key_of(row), row), now=T0) == AlreadyDone()


def test_a_claim_of_a_held_task_returns_when_it_lapses() -> None:
    row = a_claimed_task(claim_until=T0 + 40)

    verdict = Stale(key_of(row), row)

    assert settlement.claim_result(verdict, now=T0) == HeldByOther(until=T0 + 40)
    assert settlement.claim_result(verdict, now=T0 + 50) == HeldByOther(until=T0 + 50)


def test_a_claim_of_a_missing_row_finds_no_task() -> None:
    key = key_of(a_task())

    assert settlement.claim_result(Missing(key), now=T0) == NoSuchTask()
    assert settlement.claim_result(Stale(key, None), now=T0) == NoSuchTask()


def test_a_heartbeat_is_refused_once_the_task_has_another_claim_number() -> None:
    task = a_claimed_task()

    (update,) = settlement.extend_claim(ref_to(task), task, now=T0 + 10).writes

    assert isinstance(update, Update)
    assert update.guard.equals == (("claim", 4),)
    assert update.guard.status_in == frozenset({TaskStatus.PROCESSING})
    assert update.values == {
        "status": TaskStatus.PROCESSING,
        "claim_until": T0 + 10 + limits.CLAIM_TTL_S,
        "started_at": task.started_at,
    }


def _changes_that_end_a_claim(task: Task) -> dict[str, Change]:
    ref = ref_to(task)
    return {
        "succeed": settlement.succeed(ref, task, RESULT, spent=FREE, now=T0),
        "fail": settlement.fail(ref, task, FailureReason.BLOCKED, PROBLEM, spent=FREE, now=T0),
        "release": settlement.release_for_retry(ref, task, PROBLEM, spent=FREE, now=T0),
        "hand back": settlement.release_claim(ref, task, now=T0),
    }


@pytest.mark.parametrize("way", ["succeed", "fail", "release", "hand back"])
def test_every_write_that_ends_a_claim_is_fenced_by_its_number(way: str) -> None:
    flip, _ = updates_of(_changes_that_end_a_claim(a_claimed_task())[way])

    assert flip.guard.equals == (("claim", 4),)
    assert flip.guard.status_in == frozenset({TaskStatus.PROCESSING})
    assert flip.values["claim_until"] == 0.0


@pytest.mark.parametrize(
    ("way", "gates"),
    [
        ("succeed", SETTLES_PASS),
        ("fail", SETTLES_PASS),
        ("release", RELEASES_PASS),
        ("hand back", RELEASES_PASS),
    ],
)
def test_draining_counters_let_tasks_be_released_but_not_settled(
    way: str, gates: frozenset[CounterState]
) -> None:
    _, count = updates_of(_changes_that_end_a_claim(a_claimed_task())[way])

    assert count.guard.status_in == gates
    assert (CounterState.DRAINING in gates) is (way in {"release", "hand back"})


def test_a_success_counts_once_in_the_same_change() -> None:
    task = a_claimed_task()

    flip, count = updates_of(
        settlement.succeed(ref_to(task), task, RESULT, spent=Cost(5, 700), now=T0 + 3)
    )

    assert flip.values["status"] is TaskStatus.SUCCESSFUL
    assert flip.values["result"] == RESULT
    assert flip.values["problem"] is None
    assert flip.deltas == {"attempts": 1, "credits": 5, "cost_micros": 700}
    assert count.deltas == {
        "done": 1,
        "successful": 1,
        "stored_bytes": RESULT.size_bytes,
        "credits": 5,
        "cost_micros": 700,
    }


@pytest.mark.parametrize("reason", list(FailureReason))
def test_a_failure_is_counted_under_its_reason(reason: FailureReason) -> None:
    task = a_claimed_task()

    flip, count = updates_of(
        settlement.fail(ref_to(task), task, reason, PROBLEM, spent=FREE, now=T0)
    )

    assert flip.values["status"] is TaskStatus.FAILED
    assert flip.values["reason"] is reason
    assert count.deltas == {"done": 1, "failed": 1, reason.value: 1}
    assert set(count.deltas) <= set(a_stats().__struct_fields__)


def test_a_task_released_for_retry_counts_as_retrying_and_its_cost_is_counted() -> None:
    task = a_claimed_task()

    flip, count = updates_of(
        settlement.release_for_retry(ref_to(task), task, PROBLEM, spent=Cost(1), now=T0)
    )

    assert flip.values["status"] is TaskStatus.PENDING
    assert flip.deltas == {"attempts": 1, "credits": 1}
    assert count.deltas == {"retrying": 1, "credits": 1}


def test_releasing_a_claim_counts_no_attempt_and_adds_no_history() -> None:
    task = a_claimed_task()

    flip, count = updates_of(settlement.release_claim(ref_to(task), task, now=T0))

    assert flip.deltas == {"handed_back": 1}
    assert flip.values["status"] is TaskStatus.PENDING
    assert "history" not in flip.values
    assert count.deltas == {"retrying": 1}, "it was tried before, and is between tries again"


def test_every_attempt_is_kept_in_the_history() -> None:
    task = a_claimed_task(attempts=0)
    first, _ = updates_of(
        settlement.release_for_retry(ref_to(task), task, PROBLEM, spent=Cost(2), now=T0 + 1)
    )
    again = msgspec.structs.replace(task, attempts=1, history=first.values["history"])

    second, _ = updates_of(settlement.succeed(ref_to(again), again, RESULT, spent=FREE, now=T0 + 9))

    assert [attempt.number for attempt in second.values["history"]] == [1, 2]
    assert [attempt.problem for attempt in second.values["history"]] == [PROBLEM, None]
    assert [attempt.ended_at for attempt in second.values["history"]] == [T0 + 1, T0 + 9]


def test_an_applied_settle_returns_the_counters_after_it() -> None:
    stats = a_stats(admitted=2, done=1)

    assert settlement.settle_result(Applied((a_task(), stats)), a_claimed_task()) == Settled(stats)


def test_more_tasks_done_than_admitted_is_an_assertion_error() -> None:
    stats = a_stats(admitted=1, done=2)

    with pytest.raises(AssertionError, match="more tasks are done"):
        settlement.settle_result(Applied((a_task(), stats)), a_claimed_task())


def test_a_settle_against_closed_or_missing_counters_finds_the_run_closed() -> None:
    stats = a_stats(status=CounterState.CLOSED)

    assert settlement.settle_result(Stale(key_of(stats), stats), a_claimed_task()) == RunClosed()
    assert settlement.settle_result(Missing(key_of(stats)), a_claimed_task()) == RunClosed()


def test_a_settle_under_an_outdated_claim_number_is_a_lost_claim() -> None:
    mine = a_claimed_task(claim=4)
    row = a_claimed_task(claim=5)

    assert settlement.settle_result(Stale(key_of(row), row), mine) == LostClaim()


@pytest.mark.parametrize("status", [TaskStatus.SUCCESSFUL, TaskStatus.FAILED, TaskStatus.PENDING])
def test_a_stale_settle_is_settled_if_the_row_shows_the_same_claim_and_attempt(
    status: TaskStatus,
) -> None:
    mine = a_claimed_task(claim=4)
    row = a_task(status=status, claim=4, attempts=mine.attempts + 1)

    assert settlement.settle_result(Stale(key_of(row), row), mine) == Settled(None)


def test_a_settle_of_a_task_released_under_the_same_claim_is_a_lost_claim() -> None:
    mine = a_claimed_task(claim=4)
    row = a_task(status=TaskStatus.PENDING, claim=4, attempts=mine.attempts)

    assert settlement.settle_result(Stale(key_of(row), row), mine) == LostClaim()


def test_a_run_may_be_complete_when_all_admitted_tasks_of_a_shard_are_done() -> None:
    assert settlement.may_be_drained(Settled(a_stats(admitted=2, done=2)))
    assert not settlement.may_be_drained(Settled(a_stats(admitted=2, done=1)))
    assert settlement.may_be_drained(Settled(None))


def test_when_settles_are_counted_together_retries_stay_with_their_own_shard() -> None:
    task = a_claimed_task(shard=3)
    ref = ref_to(task)
    end = settlement.succeed(ref, task, RESULT, spent=FREE, now=T0)
    retry = settlement.release_for_retry(ref, task, PROBLEM, spent=FREE, now=T0)
    assert isinstance(end, SettleChange)
    assert isinstance(retry, SettleChange)

    ended, retried = (settlement.count_together(change, 1) for change in (end, retry))

    assert (ended.flip, retried.flip) == (end.flip, retry.flip)
    assert ended.count.key == key_of(a_stats(1))
    assert retried.count.key == key_of(a_stats(3))
    assert (ended.count.deltas, ended.count.guard) == (end.count.deltas, end.count.guard)
    # The result of the write contains no counters of a single shard.
    assert settlement.settle_result(Applied((None, None)), task) == Settled(None)
    assert ended.count.is_quiet
    assert retried.count.is_quiet


def test_a_task_that_keeps_losing_its_workers_fails() -> None:
    claims = 1 + limits.LOST_WORKERS_MAX + 2 + 5

    last = a_claimed_task(attempts=2, handed_back=5, claim=claims)
    over = a_claimed_task(attempts=2, handed_back=5, claim=claims + 1)

    assert settlement.lost_workers_problem(last) is None
    problem = settlement.lost_workers_problem(over)
    assert problem is not None
    assert problem.code == "worker_crashed"


def test_a_task_may_be_retried_while_attempts_are_left() -> None:
    random = Random(1)

    def delay(attempts: int) -> float | None:
        task = a_claimed_task(attempts=attempts)
        return settlement.may_retry(
            task, FailureReason.TIMEOUT, attempts_max=3, retry_after_s=None, random=random
        )

    assert delay(0) is not None
    assert delay(1) is not None
    assert delay(2) is None


def test_a_claim_of_a_retrying_task_decrements_the_retrying_count() -> None:
    row = a_task(attempts=2)
    refused = Stale(key_of(row), row)

    change = settlement.reclaim(ref_to(row), refused, now=T0)

    assert change is not None
    flip, count = updates_of(change)
    assert flip.guard.equals == (("attempts", 2),)
    assert flip.guard.status_in == frozenset({TaskStatus.PENDING})
    assert count.deltas == {"retrying": -1}


def test_a_lapsed_claim_of_a_tried_task_is_taken_over_without_a_counter_write() -> None:
    row = a_task(attempts=1, status=TaskStatus.PROCESSING, claim_until=T0 - 1)

    change = settlement.reclaim(ref_to(row), Stale(key_of(row), row), now=T0)

    assert change is not None
    assert len(change.writes) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"attempts": 0},
        {"attempts": 1, "status": TaskStatus.SUCCESSFUL},
        {"attempts": 1, "status": TaskStatus.PROCESSING, "claim_until": T0 + 1},
    ],
    ids=["never tried", "over", "held"],
)
def test_a_claim_refused_for_another_reason_is_not_repeated(fields: dict[str, Any]) -> None:
    row = a_task(**fields)

    assert settlement.reclaim(ref_to(row), Stale(key_of(row), row), now=T0) is None


def test_a_claim_refused_by_the_counters_finds_no_task() -> None:
    assert settlement.claim_result(Stale(key_of(a_stats()), a_stats()), now=T0) == NoSuchTask()


# First deliveries are held under claim 0, without a write.


def first_delivery(**fields: Any) -> Task:
    return a_task(started_at=T0, **fields)


def test_a_first_delivery_of_a_pending_task_is_held_without_a_claim_number() -> None:
    claim = settlement.hold_first(a_task(), nonce="f00d", now=T0)

    assert claim == Claimed(first_delivery(), "f00d")
    assert claim.claim_id == "0.f00d"


def test_a_first_delivery_of_a_missing_or_ended_task_is_not_held() -> None:
    ended = a_task(status=TaskStatus.SUCCESSFUL)

    assert settlement.hold_first(None, nonce="n", now=T0) == NoSuchTask()
    assert settlement.hold_first(ended, nonce="n", now=T0) == AlreadyDone()


@pytest.mark.parametrize(
    "row",
    [
        a_task(claim=1, attempts=1),
        a_claimed_task(),
        a_task(status=TaskStatus.PROCESSING, claim_until=T0 + 20, started_at=T0 - 30),
        DamagedTask(**msgspec.structs.asdict(a_task()), damaged=("url",)),
    ],
    ids=["tried", "claimed", "extended by a heartbeat", "damaged"],
)
def test_a_task_that_was_claimed_before_is_not_held_without_a_write(row: Task) -> None:
    assert settlement.hold_first(row, nonce="n", now=T0) is None


def test_a_settle_of_a_first_delivery_is_fenced_against_any_claim() -> None:
    task = first_delivery()

    change = settlement.succeed(ref_to(task), task, RESULT, spent=FREE, now=T0 + 1)

    flip, _ = updates_of(change)
    assert flip.guard.equals == (("claim", 0),)
    assert flip.guard.status_in == frozenset({TaskStatus.PENDING, TaskStatus.PROCESSING})
    assert flip.deltas["claim"] == 1
    assert flip.values["started_at"] == T0


def test_a_release_of_a_first_delivery_counts_its_claim_and_its_cost() -> None:
    task = first_delivery()

    change = settlement.release_claim(ref_to(task), task, spent=Cost(5), problem=PROBLEM, now=T0)

    flip, count = updates_of(change)
    assert flip.deltas == {"claim": 1, "handed_back": 1, "credits": 5}
    assert count.deltas == {"credits": 5}


def test_a_heartbeat_of_a_first_delivery_writes_it_as_processing_without_a_claim() -> None:
    task = first_delivery()

    (update,) = settlement.extend_claim(ref_to(task), task, now=T0 + 20).writes

    assert isinstance(update, Update)
    assert update.values["status"] is TaskStatus.PROCESSING
    assert update.values["started_at"] == T0
    assert not update.deltas


@pytest.mark.parametrize(("started_at", "is_own"), [(T0, True), (T0 + 3, False)])
def test_a_first_delivery_recognises_its_own_settle_by_its_start_time(
    started_at: float, is_own: bool
) -> None:
    ended = Attempt(number=1, started_at=started_at, ended_at=T0 + 5, problem=None)
    row = a_task(status=TaskStatus.SUCCESSFUL, claim=1, attempts=1, history=(ended,))

    verdict = settlement.settle_result(Stale(key_of(row), row), first_delivery())

    assert verdict == (Settled(None) if is_own else LostClaim())


@pytest.mark.parametrize(("age_s", "is_written"), [(1.0, False), (25.0, True), (-5.0, True)])
def test_a_first_delivery_is_in_the_row_only_after_a_heartbeat(
    age_s: float, is_written: bool
) -> None:
    assert settlement.is_written(first_delivery(), now=T0 + age_s) is is_written
    assert settlement.is_written(a_claimed_task(), now=T0 + age_s)
