"""Duplicates within a list share one fetch, whatever happens to it (SPEC.md 4.23)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
import trio
from trio.testing import MockClock

from conveyor.domain.budget import BudgetCap, Price, Unit
from conveyor.domain.ids import BatchId, JobId, RunId
from conveyor.domain.model import FailureReason, HostLimit, HostLimits, RunStatus, Task, TaskStatus
from conveyor.domain.submit.admission import TaskDraft
from conveyor.domain.submit.target import TargetPolicy
from conveyor.ports.gateway import Outcome, ScrapeRequest
from conveyor.usecases.context import RuntimeConfig
from conveyor.usecases.run import runs
from conveyor.usecases.run.audit import audit
from conveyor.usecases.run.rerun import rerun
from conveyor.usecases.submit.jobs import Submission, add_tasks, submit
from tests.actors.faults import Faults, faulty
from tests.actors.world import CALLER, World, a_miss, a_page, make_world

A, B = "https://example.com/a", "https://example.com/b"
LIST = [A, B, "https://EXAMPLE.com:443/a#x", A, "https://example.com/./b", A]


def chunked(world: World, lines: int) -> World:
    """The ports with a chunk size of so many lines."""
    config = RuntimeConfig(
        targets=TargetPolicy(), at_once_max=0, sync_tasks_max=1, chunk_tasks=lines
    )
    return replace(world, env=replace(world.env, config=config))


def by_index(tasks: Sequence[Task]) -> list[Task]:
    return sorted(tasks, key=lambda task: task.index)


@pytest.mark.parametrize("chunk_tasks", [1, 2, 100, None])
async def test_duplicates_are_fetched_once_and_name_their_original(
    autojump_clock: MockClock, chunk_tasks: int | None
) -> None:
    world = make_world()
    if chunk_tasks is not None:
        world = chunked(world, chunk_tasks)

    async with world.working():
        accepted = await world.submit(LIST, dedup=True)
        run, totals = await world.wait_for_end(accepted)

    tasks = by_index(await world.tasks(accepted))
    first, second = tasks[0].task_id, tasks[1].task_id
    assert [task.duplicate_of for task in tasks] == [None, None, first, first, second, first]
    assert world.gateway.calls == {A: 1, B: 1}
    assert (run.total, totals.done, totals.successful) == (6, 6, 6)
    assert [task.result for task in tasks[2:]] == [tasks[0].result] * 2 + [
        tasks[1].result,
        tasks[0].result,
    ]
    assert totals.stored_bytes == sum(task.result.size_bytes for task in tasks[:2] if task.result)
    assert (await audit(world.env, run)).is_ok


async def test_without_dedup_every_line_is_fetched(autojump_clock: MockClock) -> None:
    world = make_world()

    async with world.working():
        accepted = await world.submit(LIST)
        await world.wait_for_end(accepted)

    assert world.gateway.calls.total() == len(LIST)
    assert all(task.duplicate_of is None for task in await world.tasks(accepted))


async def test_duplicates_fail_as_their_original_after_its_last_attempt(
    autojump_clock: MockClock,
) -> None:
    world = make_world(script=lambda request, attempt: a_miss(FailureReason.BLOCKED))

    async with world.working():
        accepted = await world.submit(LIST, dedup=True, max_attempts=3)
        run, totals = await world.wait_for_end(accepted)

    tasks = by_index(await world.tasks(accepted))
    assert world.gateway.calls == {A: 3, B: 3}
    assert (totals.failed, totals.reasons) == (6, {"blocked": 6})
    assert [task.attempts for task in tasks] == [3, 3, 1, 1, 1, 1]
    assert (totals.retrying, run.status) == (0, RunStatus.COMPLETED)
    assert (await audit(world.env, run)).is_ok


async def test_a_rerun_of_a_stopped_run_shares_fetches_again(autojump_clock: MockClock) -> None:
    def script(request: ScrapeRequest, attempt: int) -> Outcome:
        return a_miss() if request.url == A and attempt < 3 else a_page()

    world = make_world(script=script)
    async with world.working():
        accepted = await world.submit(LIST, dedup=True, max_attempts=9)
        await trio.sleep(0.3)
        await runs.stop(world.env, CALLER, accepted.job.job_id)
        run, totals = await world.wait_for_end(accepted)
        assert (run.status, world.gateway.calls) == (RunStatus.STOPPED, {A: 1, B: 1})
        assert totals.done < len(LIST)

        query = frozenset({TaskStatus.PENDING})
        again = await rerun(
            world.env,
            CALLER,
            accepted.job.job_id,
            run_id=RunId(world.env.new_id()),
            retry=query,
        )
        run, totals = await world.wait_for_end(again)

    assert (totals.successful, run.total) == (len(LIST), len(LIST))
    assert world.gateway.calls == {A: 3, B: 1}  # The page of B is inherited, also by its duplicate.
    tasks = by_index(await world.tasks(again))
    assert tasks[4].result == tasks[1].result
    assert tasks[4].source_run_id == tasks[1].source_run_id == accepted.run.run_id
    assert (await audit(world.env, run)).is_ok


async def test_a_duplicate_has_no_cost_and_uses_no_turn_at_its_host(
    autojump_clock: MockClock,
) -> None:
    world = make_world()
    world.gateway.prices = Price(5, 0)
    limits = HostLimits(HostLimit(concurrency=1, rate_per_s=1.0))

    async with world.working():
        accepted = await world.submit(
            [A] * 40, dedup=True, budget=BudgetCap(Unit.CREDITS, 5), host_limits=limits
        )
        _, totals = await world.wait_for_end(accepted, within_s=10)

    assert (totals.successful, world.gateway.calls) == (40, {A: 1})


async def test_a_duplicate_waits_while_its_original_is_retried(autojump_clock: MockClock) -> None:
    def script(request: ScrapeRequest, attempt: int) -> Outcome:
        return a_miss(FailureReason.RATE_LIMITED) if attempt < 4 else a_page()

    world = make_world(script=script)
    async with world.working():
        accepted = await world.submit([A, A, A], dedup=True, max_attempts=5)
        _, totals = await world.wait_for_end(accepted)

    tasks = by_index(await world.tasks(accepted))
    assert (totals.successful, totals.retrying, world.gateway.calls) == (3, 0, {A: 4})
    assert all(task.claim == task.attempts + task.handed_back for task in tasks)


async def test_tasks_with_other_headers_or_bodies_or_of_other_lists_are_no_duplicates(
    autojump_clock: MockClock,
) -> None:
    world = make_world()
    post = {"method": "POST"}
    drafts = [
        TaskDraft(url=A),
        TaskDraft(url=A, params={"custom_headers": {"cookie": "a=1"}}),
        TaskDraft(url=A, params={"custom_headers": {"cookie": "a=2"}}),
        TaskDraft(url=A, params={"custom_headers": {"cookie": "a=1"}}),
        TaskDraft(url=A, body=msgspec.Raw(b'"x=1"'), **post),
        TaskDraft(url=A, body=msgspec.Raw(b'"x=2"'), **post),
        TaskDraft(url=A, body=msgspec.Raw(b'"x=1"'), **post),
        TaskDraft(url=A, params={"js_render": "true"}),
    ]
    async with world.working():
        request = Submission(drafts=drafts, dedup=True, is_open=True)
        accepted = await submit(world.env, CALLER, request, job_id=JobId(world.env.new_id()))
        await add_tasks(
            world.env,
            CALLER,
            accepted.job.job_id,
            [TaskDraft(url=A)],
            is_last=True,
            batch_id=BatchId("another"),
        )
        await world.wait_for_end(accepted)

    tasks = by_index(await world.tasks(accepted))
    shared = {task.index: task.duplicate_of for task in tasks if task.duplicate_of}
    ids = {task.index: task.task_id for task in tasks if task.batch_id == "0"}
    assert shared == {3: ids[1], 6: ids[4]}


async def test_an_interrupted_ingest_chooses_the_same_originals(autojump_clock: MockClock) -> None:
    plain, interrupted = chunked(make_world(), 2), chunked(make_world(), 2)
    faults = Faults(after=Counter(put_chunk=3))
    world = replace(
        interrupted, env=replace(interrupted.env, store=faulty(interrupted.env.store, faults))
    )
    ended = []
    for each in (plain, world):
        async with each.working():
            accepted = await each.submit(LIST * 3, dedup=True)
            await each.wait_for_end(accepted)
        tasks = by_index(await each.tasks(accepted))
        ended.append([ids_of(tasks).get(task.duplicate_of) for task in tasks])

    assert ended[0] == ended[1]
    assert ended[0].count(None) == 2


async def test_an_original_whose_message_is_lost_is_sent_again(autojump_clock: MockClock) -> None:
    """Found by the simulator (seed 81021 of AWS): the duplicates waited for it without end."""
    world = make_world()
    accepted = await world.submit([A, A, A], dedup=True)
    original = by_index(await world.tasks(accepted))[0].task_id
    run_id = accepted.run.run_id
    for message in await world.env.queue.receive(run_id, count_max=10, visibility_s=1):
        if message.ref.task_id == original:
            await world.env.queue.ack([message])

    async with world.working():
        run, totals = await world.wait_for_end(accepted)

    assert run.status is RunStatus.COMPLETED
    assert (totals.successful, world.gateway.calls) == (3, {A: 1})


def ids_of(tasks: Sequence[Task]) -> dict[str | None, int]:
    return {task.task_id: task.index for task in tasks}
