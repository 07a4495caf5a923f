"""The laws of Store.delete_run_rows and Store.delete_expired: which rows are removed, and which
stay (docs/engines.md)."""

from __future__ import annotations

import pytest

from conveyor.domain.changes import Insert, Row
from conveyor.domain.ids import CallerId, NoticeId, RunId
from conveyor.ports.store import Store
from tests.builders import (
    JOB,
    OTHER_JOB,
    OTHER_RUN,
    RUN,
    T0,
    ManualClock,
    a_batch,
    a_budget,
    a_change,
    a_deletion_intent,
    a_job,
    a_notice,
    a_record,
    a_run,
    a_sample,
    a_share,
    a_stats,
    a_task,
    an_export,
    keep,
    kept,
    key_of,
)


def _rows_of_run(run_id: RunId, number: int) -> list[Row]:
    return [
        a_run(run_id, sequence=number, shard_count=2),
        a_batch(run_id),
        a_stats(0, run_id),
        a_stats(1, run_id),
        a_task(0, run_id),
        a_task(1, run_id, shard=1),
        a_notice(number, run_id=run_id),
        an_export(number, run_id=run_id),
        a_budget(run_id),
        a_share(run_id),
        a_sample(1, run_id),
    ]


async def _remaining_rows(store: Store, rows: list[Row]) -> list[Row]:
    return [row for row in rows if await kept(store, row) is not None]


async def test_deleting_the_rows_of_a_run_removes_no_others(store: Store) -> None:
    deleted_rows, kept_rows = _rows_of_run(RUN, 1), _rows_of_run(OTHER_RUN, 2)
    intents: list[Row] = [a_job(), a_record(), a_deletion_intent(run_id=RUN)]
    await keep(store, *deleted_rows, *kept_rows, *intents)

    count = await store.delete_run_rows(JOB, RUN, limit=100)

    assert count == len(deleted_rows)
    assert await _remaining_rows(store, deleted_rows) == []
    assert await _remaining_rows(store, [*kept_rows, *intents]) == [*kept_rows, *intents]


async def test_deleting_the_rows_of_a_job_keeps_its_own_row_and_its_intents(store: Store) -> None:
    deleted_rows = _rows_of_run(RUN, 1) + _rows_of_run(OTHER_RUN, 2)
    intents: list[Row] = [a_job(), a_record(), a_deletion_intent()]
    foreign_run = RunId("01FOREIGN")
    foreign: list[Row] = [
        a_job(OTHER_JOB, caller=CallerId("caller-b")),
        a_run(foreign_run, job_id=OTHER_JOB),
        a_batch(foreign_run, job_id=OTHER_JOB),
        a_stats(0, foreign_run, job_id=OTHER_JOB),
        a_notice(3, run_id=foreign_run, job_id=OTHER_JOB, notice_id=NoticeId("FOREIGN")),
        a_budget(foreign_run, job_id=OTHER_JOB),
        a_share(foreign_run, job_id=OTHER_JOB),
        a_sample(1, foreign_run, job_id=OTHER_JOB),
    ]
    foreign_task = a_task(0, foreign_run)
    task_key = key_of(foreign_task, OTHER_JOB)
    await keep(store, *deleted_rows, *intents, *foreign)
    await store.commit([a_change(Insert(task_key, foreign_task))])

    count = await store.delete_run_rows(JOB, None, limit=100)

    assert count == len(deleted_rows)
    assert await _remaining_rows(store, deleted_rows) == []
    assert await _remaining_rows(store, [*intents, *foreign]) == [*intents, *foreign]
    assert await store.read(task_key) == foreign_task


@pytest.mark.parametrize("run_id", [RUN, None])
async def test_deletion_in_limited_calls_removes_all_rows(
    store: Store, run_id: RunId | None
) -> None:
    deleted_rows = _rows_of_run(RUN, 1)
    await keep(store, a_job(), *deleted_rows)

    counts = [await store.delete_run_rows(JOB, run_id, limit=3) for _ in range(5)]

    assert counts == [3, 3, 3, 2, 0]
    assert await _remaining_rows(store, deleted_rows) == []


async def test_the_run_row_is_deleted_last(store: Store) -> None:
    deleted_rows = _rows_of_run(RUN, 1)
    await keep(store, *deleted_rows)

    for _ in deleted_rows[1:]:
        await store.delete_run_rows(JOB, None, limit=1)

    assert await _remaining_rows(store, deleted_rows) == [deleted_rows[0]]


async def test_delete_expired_removes_the_idempotency_records_that_expired_before_now(
    store: Store, clock: ManualClock
) -> None:
    expired = [a_record("a", expires_at=T0 - 1), a_record("b", expires_at=T0 - 0.001)]
    living = [a_record("c", expires_at=T0), a_record("d", expires_at=T0 + 1)]
    await keep(store, *expired, *living)

    counts = [await store.delete_expired(clock.now()), await store.delete_expired(clock.now())]

    assert counts == [2, 0]
    assert await _remaining_rows(store, [*expired, *living]) == living
