"""Lookup: callers find only their own jobs, and pages contain every task of a run once."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import cast

import pytest

from conveyor.domain.changes import Key, R, TaskKey
from conveyor.domain.errors import NotFound
from conveyor.domain.ids import CallerId, RunId, TaskId
from conveyor.domain.model import Run, Task, TaskStatus
from conveyor.ports.store import Store
from conveyor.usecases import lookup
from conveyor.usecases.context import Context
from conveyor.usecases.run import runs
from conveyor.usecases.run.rerun import rerun
from conveyor.usecases.submit import jobs
from conveyor.usecases.submit.jobs import Accepted
from tests.builders import CALLER, a_ulid
from tests.usecases.scheduled import schedule
from tests.usecases.world import OTHER_CALLER, missing, rows_of, submit, with_config, work


async def a_job_with_two_runs(env: Context) -> tuple[Accepted, Run]:
    first = await submit(env, 2)
    await work(env, first.run)
    second = await rerun(env, CALLER, first.job.job_id, run_id=RunId(env.new_id()))
    await work(env, second.run)
    return first, second.run


async def pages(
    env: Context,
    run: Run,
    *,
    statuses: frozenset[TaskStatus] | None = None,
    after: TaskId | None = None,
    limit: int | None = None,
) -> list[list[Task]]:
    walk = lookup.pages_of(env, run, statuses=statuses, after=after, limit=limit)
    async with aclosing(walk) as tasks:
        return [page async for page in tasks]


async def test_a_foreign_or_deleted_job_is_not_found(env: Context) -> None:
    mine = await submit(env, 1)
    gone = await submit(env, 1)
    await jobs.delete(env, CALLER, gone.job.job_id)

    assert (await lookup.load_owned_job(env, CALLER, mine.job.job_id)).job_id == mine.job.job_id
    answers = []
    for caller, job_id in (
        (OTHER_CALLER, mine.job.job_id),
        (CALLER, gone.job.job_id),
        (CALLER, a_ulid(77)),
        (CALLER, "../" + mine.job.job_id),
    ):
        with pytest.raises(NotFound) as refusal:
            await lookup.load_owned_job(env, caller, job_id)
        answers.append(refusal.value.detail)
    assert len(set(answers)) == 1


async def test_a_tombstone_is_shown_to_the_owner_of_its_job_only(env: Context) -> None:
    remaining, gone = await submit(env, 1), await submit(env, 1)
    await jobs.delete(env, CALLER, gone.job.job_id)

    assert await lookup.is_tombstone(env, CALLER, gone.job.job_id)
    assert not await lookup.is_tombstone(env, OTHER_CALLER, gone.job.job_id)
    assert not await lookup.is_tombstone(env, CALLER, remaining.job.job_id)
    assert not await lookup.is_tombstone(env, CALLER, "no id")


async def test_a_run_is_found_in_its_own_job_until_it_is_deleted(env: Context) -> None:
    first, latest = await a_job_with_two_runs(env)
    other = await submit(env, 1)

    run = await lookup.load_owned_run(env, first.job, first.run.run_id)
    await runs.delete_run(env, CALLER, first.job.job_id, first.run.run_id)

    assert run.run_id == first.run.run_id
    assert (await lookup.load_owned_run(env, first.job, latest.run_id)).run_id == latest.run_id
    for job, run_id in (
        (first.job, first.run.run_id),
        (other.job, latest.run_id),
        (first.job, a_ulid(77)),
        (first.job, "no id"),
    ):
        with pytest.raises(NotFound):
            await lookup.load_owned_run(env, job, run_id)


async def test_a_signed_link_is_invalid_once_its_run_or_job_is_deleted(env: Context) -> None:
    first, latest = await a_job_with_two_runs(env)
    job_id = first.job.job_id

    async def is_visible(run_id: RunId) -> bool:
        try:
            job, run = await lookup.visible_run(env, job_id, run_id, absent="The link is over.")
        except NotFound:
            return False
        return (job.job_id, run.run_id) == (job_id, run_id)

    seen = [await is_visible(first.run.run_id), await is_visible(latest.run_id)]
    await runs.delete_run(env, CALLER, job_id, first.run.run_id)
    seen += [await is_visible(first.run.run_id), await is_visible(latest.run_id)]
    await jobs.delete(env, CALLER, job_id)
    seen += [await is_visible(latest.run_id)]

    assert seen == [True, True, False, True, False]


async def test_the_latest_run_of_a_job_is_the_one_that_started_last(env: Context) -> None:
    first, latest = await a_job_with_two_runs(env)
    job = await lookup.load_owned_job(env, CALLER, first.job.job_id)
    unfired = await schedule(env)

    assert (await lookup.require_latest_run(env, job)).run_id == latest.run_id
    assert await lookup.latest_run(env, unfired) is None
    with pytest.raises(NotFound):
        await lookup.require_latest_run(env, unfired)


async def test_a_job_that_was_seen_before_is_shown_as_it_is_now(env: Context) -> None:
    async def look(caller: CallerId = CALLER) -> RunId | None:
        _, run, _ = await lookup.load_owned_job_and_run(env, caller, job_id)
        return None if run is None else run.run_id

    first = await submit(env, 2)
    job_id = first.job.job_id
    await work(env, first.run)
    seen = [await look(), await look()]
    second = await rerun(env, CALLER, job_id, run_id=RunId(env.new_id()))
    seen += [await look(), await look()]
    with pytest.raises(NotFound):
        await look(OTHER_CALLER)
    await jobs.delete(env, CALLER, job_id)
    with pytest.raises(NotFound):
        await look()

    assert seen == [first.run.run_id] * 2 + [second.run.run_id] * 2


@dataclass(slots=True)
class ShardedStore:
    """A store that finds a task only in its own shard, as one with partitions does."""

    inner: Store

    async def read(self, key: Key[R]) -> R | None:
        row = await self.inner.read(key)
        is_elsewhere = isinstance(key, TaskKey) and isinstance(row, Task) and row.shard != key.shard
        return None if is_elsewhere else row


async def test_a_task_is_found_by_its_id_in_any_shard(env: Context) -> None:
    accepted = await submit(env, 20, is_open=True)
    rows = await rows_of(env, accepted.run)
    sharded = replace(env, store=cast("Store", ShardedStore(env.store)))

    tasks = [await lookup.load_task(sharded, accepted.run, row.task_id) for row in rows]

    assert tasks == rows
    assert len({row.shard for row in rows}) > 1
    for task_id in ("no id", "../x", "0" * len(rows[0].task_id)):
        with pytest.raises(NotFound):
            await lookup.load_task(env, accepted.run, task_id)


async def test_totals_are_summed_over_all_shards(env: Context) -> None:
    accepted = await submit(env, 20, is_open=True)
    await work(env, accepted.run, missing([0, 1]))

    totals = await lookup.totals_of(env, accepted.run)

    assert (totals.admitted, totals.successful, totals.failed) == (20, 18, 2)


@pytest.mark.parametrize("limit", [1, 7, 20, 21, None])
async def test_iterating_tasks_yields_each_once_in_id_order(
    env: Context, limit: int | None
) -> None:
    accepted = await submit(env, 20, is_open=True)

    tasks = await pages(env, accepted.run, limit=limit)

    ids = [task.task_id for page in tasks for task in page]
    assert ids == sorted(row.task_id for row in await rows_of(env, accepted.run))
    assert all(len(page) <= (limit or 20) for page in tasks)


async def test_iterating_tasks_continues_after_a_given_task(env: Context) -> None:
    accepted = await submit(env, 5)
    ids = sorted(row.task_id for row in await rows_of(env, accepted.run))

    (page,) = await pages(env, accepted.run, after=ids[1])

    assert [task.task_id for task in page] == ids[2:]


async def test_iterating_tasks_finds_rare_ones_and_yields_no_empty_page(env: Context) -> None:
    accepted = await submit(env, 30)
    await work(env, accepted.run, missing([29]))
    narrow = with_config(env, rows_read_max=3)

    tasks = await pages(narrow, accepted.run, statuses=frozenset({TaskStatus.FAILED}))

    assert [[task.index for task in page] for page in tasks] == [[29]]
