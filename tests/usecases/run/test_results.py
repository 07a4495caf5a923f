"""Results: pages that contain every task once, links that expire, and cursors that are valid for
one list."""

from __future__ import annotations

import pytest

from conveyor.domain import limits
from conveyor.domain.errors import InvalidArgument, NotFound, TaskNotReady
from conveyor.domain.model import TaskStatus
from conveyor.domain.queries import TaskPage, TasksOf
from conveyor.usecases.context import Context
from conveyor.usecases.run import results
from conveyor.usecases.submit.jobs import Accepted
from tests.builders import ManualClock
from tests.usecases.world import World, body_of, missing, rows_of, submit, with_config, work


async def pages(env: Context, accepted: Accepted, *, status: str, limit: int) -> list[list[str]]:
    page_ids: list[list[str]] = []
    cursor: str | None = None
    while True:
        page = await results.page(
            env, accepted.job, accepted.run, status=status, cursor=cursor, limit=limit
        )
        page_ids.append([task.task_id for task in page.tasks])
        cursor = page.next_cursor
        if cursor is None:
            return page_ids


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("limit", [1, 7, 30, 31, 100])
async def test_pages_contain_every_task_once_in_id_order(
    env: Context, limit: int, is_open: bool
) -> None:
    accepted = await submit(env, 30, is_open=is_open)

    page_ids = await pages(env, accepted, status="all", limit=limit)

    ids = [task for page in page_ids for task in page]
    assert ids == sorted(row.task_id for row in await rows_of(env, accepted.run))
    assert all(0 < len(page) <= limit for page in page_ids)


async def test_a_status_filter_returns_only_tasks_of_its_statuses(env: Context) -> None:
    accepted = await submit(env, 10)
    await work(env, accepted.run, missing([0, 1, 2]), count=6)

    counts = {
        status: sum(len(page) for page in await pages(env, accepted, status=status, limit=2))
        for status in results.FILTERS
    }

    assert counts == {"all": 10, "successful": 3, "failed": 3, "processing": 4, "inflight": 0}


@pytest.mark.parametrize(
    ("status", "worked"), [("successful", 0), ("failed", 5), ("processing", 5)]
)
async def test_no_task_is_read_if_the_counters_show_none_with_the_status(
    world: World, monkeypatch: pytest.MonkeyPatch, status: str, worked: int
) -> None:
    accepted = await submit(world.env, 5)
    await work(world.env, accepted.run, count=worked)
    page_tasks = world.engine.store.page_tasks
    queries: list[object] = []

    async def page_and_record(query: TasksOf, *, read_max: int) -> TaskPage:
        queries.append(query)
        return await page_tasks(query, read_max=read_max)

    monkeypatch.setattr(world.engine.store, "page_tasks", page_and_record)

    page_ids = await pages(world.env, accepted, status=status, limit=2)

    assert page_ids == [[]]
    assert queries == []


@pytest.mark.parametrize("limit", [1, 3, 40])
async def test_rare_tasks_are_found_across_pages_that_are_empty(world: World, limit: int) -> None:
    env = with_config(world.env, rows_read_max=5)
    accepted = await submit(env, 40)
    await work(env, accepted.run, missing([3, 4, 31]))

    page_ids = await pages(env, accepted, status="failed", limit=limit)

    rows = await rows_of(env, accepted.run)
    failed = sorted(row.task_id for row in rows if row.status is TaskStatus.FAILED)
    assert [task for page in page_ids for task in page] == failed
    assert [] in page_ids


async def test_an_unknown_filter_is_refused(env: Context) -> None:
    accepted = await submit(env, 1)

    with pytest.raises(InvalidArgument):
        await pages(env, accepted, status="done", limit=1)


async def test_a_cursor_of_another_run_or_filter_is_refused(env: Context) -> None:
    one, other = await submit(env, 5), await submit(env, 5)
    page = await results.page(env, one.job, one.run, status="all", cursor=None, limit=2)

    for accepted, status in ((other, "all"), (one, "processing")):
        with pytest.raises(InvalidArgument) as refusal:
            await results.page(
                env,
                accepted.job,
                accepted.run,
                status=status,
                cursor=page.next_cursor,
                limit=2,
            )
        assert refusal.value.code == "invalid_cursor"


async def test_the_plain_id_of_a_task_of_the_run_is_accepted_as_a_cursor(env: Context) -> None:
    one, other = await submit(env, 5), await submit(env, 5)
    rows = await rows_of(env, one.run)

    page = await results.page(env, one.job, one.run, status="all", cursor=rows[2].task_id, limit=10)

    assert [task.task_id for task in page.tasks] == [row.task_id for row in rows[3:]]
    with pytest.raises(InvalidArgument):
        await results.page(
            env, other.job, other.run, status="all", cursor=rows[2].task_id, limit=10
        )


async def test_a_body_can_be_read_once_its_task_has_ended(env: Context) -> None:
    accepted = await submit(env, 2)
    with pytest.raises(TaskNotReady):
        await body_of(env, accepted.run, (await rows_of(env, accepted.run))[0].task_id)
    await work(env, accepted.run, missing([1]))
    good, bad = sorted(await rows_of(env, accepted.run), key=lambda row: row.index)

    body = await body_of(env, accepted.run, good.task_id)
    failed, _ = await results.ended_task(env, accepted.run, bad.task_id)

    assert body == b"<html>"
    assert failed.result is None
    assert failed.problem is not None


@pytest.mark.parametrize("task_id", ["nope", "../../etc", "", "a" * 200])
async def test_an_unknown_task_is_not_found(env: Context, task_id: str) -> None:
    accepted = await submit(env, 1)

    with pytest.raises(NotFound):
        await body_of(env, accepted.run, task_id)


async def test_a_body_that_is_no_longer_stored_is_not_found(env: Context) -> None:
    accepted = await submit(env, 1)
    await work(env, accepted.run)
    (row,) = await rows_of(env, accepted.run)
    await env.blobs.delete_prefix(f"jobs/{accepted.job.job_id}")

    with pytest.raises(NotFound):
        await body_of(env, accepted.run, row.task_id)


async def test_a_link_works_for_a_day_and_for_its_own_task_only(
    env: Context, clock: ManualClock
) -> None:
    accepted = await submit(env, 2)
    await work(env, accepted.run)
    row, other = await rows_of(env, accepted.run)
    token = results.link_token(env, accepted.run, row)
    place = (accepted.job.job_id, accepted.run.run_id)

    job, run = await results.run_by_link(env, *place, row.task_id, token)
    with pytest.raises(NotFound):
        await results.run_by_link(env, *place, other.task_id, token)
    clock.advance(limits.RESULT_URL_TTL_S + 1)
    with pytest.raises(NotFound):
        await results.run_by_link(env, *place, row.task_id, token)

    assert (job.job_id, run.run_id) == place


@pytest.mark.parametrize("forge", ["", ".", "0.", "x.y", "9999999999.", "9999999999.é", "-1.x"])
async def test_a_forged_link_is_not_found(env: Context, forge: str) -> None:
    accepted = await submit(env, 1)
    await work(env, accepted.run)
    (row,) = await rows_of(env, accepted.run)

    with pytest.raises(NotFound):
        await results.run_by_link(env, accepted.job.job_id, accepted.run.run_id, row.task_id, forge)


async def test_a_link_cannot_be_made_to_last_longer(env: Context) -> None:
    accepted = await submit(env, 1)
    await work(env, accepted.run)
    (row,) = await rows_of(env, accepted.run)
    expires, _, signature = results.link_token(env, accepted.run, row).partition(".")

    with pytest.raises(NotFound):
        await results.run_by_link(
            env,
            accepted.job.job_id,
            accepted.run.run_id,
            row.task_id,
            f"{int(expires) + 1}.{signature}",
        )


async def test_a_link_token_has_one_valid_spelling(env: Context) -> None:
    accepted = await submit(env, 1)
    await work(env, accepted.run)
    (row,) = await rows_of(env, accepted.run)
    token = results.link_token(env, accepted.run, row)
    place = (accepted.job.job_id, accepted.run.run_id, row.task_id)

    await results.run_by_link(env, *place, token)

    for other in (f"0{token}", f"00{token}", f" {token}", f"+{token}", f"{token}="):
        with pytest.raises(NotFound):
            await results.run_by_link(env, *place, other)
