"""Deleting a job: readers do not find it any more at once, and its data is removed by later
passes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace

import msgspec
import pytest

from conveyor.domain import limits
from conveyor.domain.changes import (
    BatchKey,
    Change,
    Guard,
    Insert,
    JobKey,
    SampleKey,
    Update,
)
from conveyor.domain.errors import NotFound
from conveyor.domain.ids import JobId, RunId
from conveyor.domain.model import (
    CounterSample,
    CounterState,
    JobStatus,
    NoticeStatus,
    RunStatus,
    StagedList,
    Webhook,
)
from conveyor.domain.queries import BatchesOf, DueNotices, DueScrubs, RunsOf, StatsOf
from conveyor.domain.run.settlement import Claimed
from conveyor.ports.errors import QueueGone, Unavailable
from conveyor.usecases.context import Context
from conveyor.usecases.lookup import load_owned_job, load_owned_run
from conveyor.usecases.run import reconcile, rerun, results, runs, tasks
from conveyor.usecases.run.ingest import Ingested
from conveyor.usecases.submit import jobs
from conveyor.usecases.submit.jobs import Accepted
from tests.builders import CALLER, ManualClock, a_ulid
from tests.usecases.faults import Fault, FaultyStore, When, with_fault
from tests.usecases.world import (
    LATER_FROM,
    OTHER_CALLER,
    PAGE,
    World,
    a_world,
    check_counters,
    gates_of,
    rows_of,
    run_of,
    submit,
    work,
)


async def a_busy_job(env: Context, number: int = 500) -> Accepted:
    """A busy job: some tasks done, one in flight, and a staged list."""
    accepted = await submit(
        env,
        120,
        job_id=JobId(a_ulid(number)),
        webhook=Webhook("https://example.com/"),
        external_id="mine",
        api_key="secret",
    )
    await work(env, accepted.run, count=10)
    (message,) = await env.queue.receive(accepted.run.run_id, count_max=1, visibility_s=60)
    assert isinstance((await tasks.claim(env, [message.ref]))[0], Claimed)
    return accepted


async def leftovers(world: World, accepted: Accepted) -> dict[str, int]:
    """Counts everything that is left of a job, except its tombstone and its deletion intent."""
    env, job_id, run_id = world.env, accepted.job.job_id, accepted.run.run_id
    due = DueNotices(statuses=frozenset({NoticeStatus.DUE}), due_by=1e12, limit=1000)
    depth = await env.queue.depth(run_id)
    try:
        await env.queue.receive(run_id, count_max=0, visibility_s=1)
        queues = 1
    except QueueGone:
        queues = 0
    return {
        "runs": len(
            await env.store.find(RunsOf(job_id=job_id, statuses=frozenset(RunStatus), limit=100))
        ),
        "tasks": len(await rows_of(env, accepted.run)),
        "batches": len(await env.store.find(BatchesOf(job_id=job_id, run_id=run_id))),
        "stats": len(await env.store.find(StatsOf(job_id=job_id, run_id=run_id, shard_count=1))),
        "notices": sum(n.job_id == job_id for n in await env.store.find(due)),
        "messages": depth.visible + depth.hidden,
        "queues": queues,
        "bodies": sum(job_id in key for key in world.engine.blobs._bodies),
    }


async def test_a_deleted_job_is_not_found_by_any_reader(env: Context) -> None:
    accepted = await a_busy_job(env)

    await jobs.delete(env, CALLER, accepted.job.job_id)

    with pytest.raises(NotFound):
        await load_owned_job(env, CALLER, accepted.job.job_id)
    for act in (
        runs.stop(env, CALLER, accepted.job.job_id),
        jobs.close(env, CALLER, accepted.job.job_id),
        rerun.rerun(env, CALLER, accepted.job.job_id, retry=None, run_id=accepted.run.run_id),
    ):
        with pytest.raises(NotFound):
            await act


async def test_a_job_can_be_deleted_twice_by_its_owner_only(env: Context) -> None:
    accepted = await a_busy_job(env)
    await jobs.delete(env, CALLER, accepted.job.job_id)

    await jobs.delete(env, CALLER, accepted.job.job_id)

    assert len(await env.store.find(DueScrubs(due_by=1e12, limit=10))) == 1
    with pytest.raises(NotFound):
        await jobs.delete(env, OTHER_CALLER, accepted.job.job_id)


async def test_links_to_results_are_invalid_after_their_job_was_deleted(env: Context) -> None:
    accepted = await submit(env, 1)
    await work(env, accepted.run)
    (row,) = await rows_of(env, accepted.run)
    token = results.link_token(env, accepted.run, row)
    place = (accepted.job.job_id, accepted.run.run_id, row.task_id)
    _, run = await results.run_by_link(env, *place, token)

    await jobs.delete(env, CALLER, accepted.job.job_id)

    assert run.run_id == accepted.run.run_id
    with pytest.raises(NotFound):
        await results.run_by_link(env, *place, token)


async def test_a_tombstone_contains_no_customer_data(env: Context) -> None:
    accepted = await a_busy_job(env)

    await jobs.delete(env, CALLER, accepted.job.job_id)

    tombstone = await env.store.read(JobKey(accepted.job.job_id))
    assert tombstone is not None
    assert tombstone.status is JobStatus.DELETED
    assert (tombstone.webhook, tombstone.external_id, tombstone.auth_sealed) == (None, None, None)


async def test_work_in_flight_on_a_deleted_job_changes_nothing(env: Context) -> None:
    accepted = await submit(env, 1)
    (message,) = await env.queue.receive(accepted.run.run_id, count_max=1, visibility_s=60)
    claim = (await tasks.claim(env, [message.ref]))[0]
    assert isinstance(claim, Claimed)
    await jobs.delete(env, CALLER, accepted.job.job_id)
    assert await gates_of(env, accepted.run) == {CounterState.CLOSED}

    result = await tasks.store_body(env, message.ref, claim, PAGE)
    late = tasks.judge_success(env, message.ref, claim.task, PAGE, result)
    await env.commit(late.change)

    assert (await check_counters(env, accepted.run)).done == 0


async def test_deletion_passes_remove_everything_but_the_tombstone_and_finally_the_tombstone(
    world: World, env: Context, clock: ManualClock
) -> None:
    accepted = await a_busy_job(env)
    other = await a_busy_job(env, 501)
    before = await leftovers(world, other)
    await jobs.delete(env, CALLER, accepted.job.job_id)

    await reconcile.delete_due(env)
    first = await leftovers(world, accepted)
    straggler = f"jobs/{accepted.job.job_id}/runs/{accepted.run.run_id}/late/1"
    await env.blobs.put(straggler, [b"body of a worker that was still at it"])
    clock.advance(limits.SECOND_DELETION_PASS_S + 1)
    await reconcile.delete_due(env)
    second = await leftovers(world, accepted)
    tombstone = await env.store.read(JobKey(accepted.job.job_id))
    clock.advance(limits.TOMBSTONE_TTL_S + 1)
    await reconcile.delete_due(env)

    assert not any(first.values()), first
    assert not any(second.values()), second
    assert tombstone is not None
    assert await env.store.read(JobKey(accepted.job.job_id)) is None
    assert await env.store.find(DueScrubs(due_by=1e12, limit=10)) == []
    assert await leftovers(world, other) == before


@pytest.mark.parametrize("is_job", [True, False])
async def test_staged_lists_are_deleted_under_current_and_earlier_keys(
    world: World, env: Context, *, is_job: bool
) -> None:
    accepted = await submit(env, 120)
    job_id, run_id = accepted.job.job_id, accepted.run.run_id
    await work(env, accepted.run)
    places = [f"sources/{job_id}/{run_id}/0", f"jobs/{job_id}/sources/{run_id}/0"]
    await env.blobs.copy(*places)
    beside = [f"sources/{job_id}0/{run_id}/0", f"jobs/{job_id}0/sources/{run_id}/0"]
    for key in beside:
        await env.blobs.copy(places[0], key)

    if is_job:
        await jobs.delete(env, CALLER, job_id)
    else:
        await runs.delete_run(env, CALLER, job_id, run_id)
    await reconcile.delete_due(env)

    assert [key for key in (*places, *beside) if key in world.engine.blobs._bodies] == beside


@pytest.mark.parametrize("key", ["sources/1/1/0", "jobs/1/sources/1/0"])
async def test_a_list_is_read_under_the_key_that_its_batch_names(env: Context, key: str) -> None:
    accepted = await submit(env, LATER_FROM)
    run = accepted.run
    (batch,) = await env.store.find(BatchesOf(job_id=run.job_id, run_id=run.run_id))
    assert isinstance(batch.source, StagedList)
    await env.blobs.copy(batch.source.key, key)
    moved = msgspec.structs.replace(batch.source, key=key)
    at = BatchKey(run.job_id, run.run_id, batch.batch_id)
    await env.commit(Change((Update(at, Guard(), {"source": moved}),)))
    await env.blobs.delete_prefix(f"sources/{run.job_id}")

    (stalled,) = await env.store.find(BatchesOf(job_id=run.job_id, run_id=run.run_id))
    assert await reconcile.finish_batch(env, stalled) is Ingested.SEALED

    assert len(await rows_of(env, run)) == LATER_FROM


@pytest.mark.slow
@pytest.mark.parametrize("when", list(When))
async def test_a_deletion_interrupted_at_any_call_leaves_nothing(when: When) -> None:
    at, goes_on = 0, True
    while goes_on:
        at += 1
        world = a_world()
        env, clock = world.env, world.clock
        accepted = await a_busy_job(env)
        fault = Fault(at, when)

        with suppress(Unavailable):
            faulty = with_fault(env, fault)
            await jobs.delete(faulty, CALLER, accepted.job.job_id)
            await reconcile.delete_due(faulty)
        with suppress(NotFound):
            await jobs.delete(env, CALLER, accepted.job.job_id)
        clock.advance(limits.DELETION_CLAIM_S + 1)  # The claim of the interrupted process lapses.
        await reconcile.delete_due(env)
        clock.advance(limits.SECOND_DELETION_PASS_S + 1)
        await reconcile.delete_due(env)

        rest = await leftovers(world, accepted)
        assert not any(rest.values()), (at, rest)
        goes_on = fault.was_reached
    assert at > 2


@dataclass(frozen=True, slots=True)
class SlowStore(FaultyStore):
    """Each call takes some time, in which another process runs its deletions. During the first call
    the clock is set."""

    env: Context
    clock: ManualClock
    takes_s: float
    step_s: float
    deleted_counts: list[int] = field(default_factory=list)

    async def delete_run_rows(self, job_id: JobId, run_id: RunId | None, *, limit: int) -> int:
        self.clock.advance(self.takes_s)
        if not self.deleted_counts:
            self.clock.step(self.step_s)
        if self.takes_s < limits.DELETION_CLAIM_S:
            await reconcile.delete_due(self.env)
        deleted = await self.inner.delete_run_rows(job_id, run_id, limit=limit)
        self.deleted_counts.append(deleted)
        return deleted


def a_slow_store(world: World, *, takes_s: float, step_s: float = 0.0) -> SlowStore:
    never = Fault(at=10**9, when=When.BEFORE)
    return SlowStore(world.env.store, never, world.env, world.clock, takes_s, step_s)


async def test_a_deletion_in_progress_is_not_repeated_by_other_processes(
    world: World, env: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconcile, "_DELETION_ROWS", 50)
    accepted = await a_busy_job(env)
    await jobs.delete(env, CALLER, accepted.job.job_id)
    slow = a_slow_store(world, takes_s=1.0)

    is_left = await reconcile.delete_due(replace(env, store=slow))

    rest = await leftovers(world, accepted)
    assert not any(rest.values()), rest
    assert sum(slow.deleted_counts) >= 120
    assert not is_left


@pytest.mark.parametrize("step_s", [0.0, -86_400.0])
async def test_a_large_deletion_stops_after_its_claim_time_and_continues_in_the_next_call(
    world: World, env: Context, monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    monkeypatch.setattr(reconcile, "_DELETION_ROWS", 50)
    accepted = await a_busy_job(env)
    await jobs.delete(env, CALLER, accepted.job.job_id)
    slow = a_slow_store(world, takes_s=limits.DELETION_CLAIM_S + 1, step_s=step_s)

    turns = 1
    while await reconcile.delete_due(replace(env, store=slow)):
        turns += 1

    rest = await leftovers(world, accepted)
    assert not any(rest.values()), rest
    assert turns == len([deleted for deleted in slow.deleted_counts if deleted]) + 1 > 2


@pytest.mark.parametrize("is_job", [True, False])
async def test_the_last_pass_removes_rows_that_workers_of_an_earlier_release_left(
    env: Context, clock: ManualClock, *, is_job: bool
) -> None:
    accepted = await submit(env, 3)
    await work(env, accepted.run)
    job_id, run_id = accepted.job.job_id, accepted.run.run_id
    if is_job:
        await jobs.delete(env, CALLER, job_id)
    else:
        await rerun.rerun(env, CALLER, job_id, retry=None, run_id=RunId(env.new_id()))
        await runs.delete_run(env, CALLER, job_id, run_id)
    await reconcile.delete_due(env)
    clock.advance(limits.SECOND_DELETION_PASS_S + 1)
    await reconcile.delete_due(env)
    # Earlier releases know no samples, so they delete none.
    sample = CounterSample(job_id=job_id, run_id=run_id, minute=1, at=env.now())
    key = SampleKey(job_id, run_id, 1)
    await env.commit(Change((Insert(key, sample),)))

    clock.advance(limits.TOMBSTONE_TTL_S + 1)
    await reconcile.delete_due(env)

    assert await env.store.read(key) is None
    assert await env.store.find(DueScrubs(due_by=1e12, limit=10)) == []


async def test_deleting_a_run_removes_that_run_only(
    world: World, env: Context, clock: ManualClock
) -> None:
    accepted = await submit(env, 120)
    await work(env, accepted.run)
    second = await rerun.rerun(
        env, CALLER, accepted.job.job_id, retry=None, run_id=RunId(env.new_id())
    )
    await work(env, second.run)

    await runs.delete_run(env, CALLER, accepted.job.job_id, accepted.run.run_id)
    await reconcile.delete_due(env)
    for _ in range(2):
        clock.advance(limits.TOMBSTONE_TTL_S + 1)
        await reconcile.delete_due(env)

    job = await load_owned_job(env, CALLER, accepted.job.job_id)
    with pytest.raises(NotFound):
        await load_owned_run(env, job, accepted.run.run_id)
    assert (await run_of(env, second.run)).status is RunStatus.COMPLETED
    assert len(await rows_of(env, second.run)) == 120
    assert await rows_of(env, accepted.run) == []
    assert not any(accepted.run.run_id in key for key in world.engine.blobs._bodies)
    assert sum(second.run.run_id in key for key in world.engine.blobs._bodies) == 120
    assert await env.store.find(DueScrubs(due_by=1e12, limit=10)) == []
