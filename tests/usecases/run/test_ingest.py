"""Ingest: interrupted at any call or taken over by another process, it admits exactly the accepted
lines."""

from __future__ import annotations

from contextlib import suppress

import pytest
import trio

from conveyor.domain.changes import Applied, BatchKey
from conveyor.domain.ids import FIRST_BATCH, JobId
from conveyor.domain.model import Batch, BatchStatus, IngestStatus, RunStatus
from conveyor.domain.run import ingestion
from conveyor.ports.errors import Unavailable
from conveyor.usecases.context import Context
from conveyor.usecases.run import ingest, reconcile, runs
from conveyor.usecases.run.ingest import Ingested
from conveyor.usecases.submit.jobs import Accepted
from tests.builders import CALLER, ManualClock, a_ulid
from tests.usecases.faults import Fault, When, with_fault
from tests.usecases.world import (
    LATER_FROM,
    World,
    check_counters,
    rows_of,
    run_of,
    submit,
    with_config,
    work,
)

COUNT = LATER_FROM


@pytest.fixture
def env(world: World) -> Context:
    """A chunk size that makes several chunks of a short list."""
    return with_config(world.env, chunk_tasks=100)


async def batch_of(env: Context, accepted: Accepted) -> Batch:
    batch = await env.store.read(BatchKey(accepted.job.job_id, accepted.run.run_id, FIRST_BATCH))
    assert batch is not None
    return batch


async def acquire_batch(env: Context, accepted: Accepted) -> Batch:
    taken = await ingest.acquire_batch(env, await batch_of(env, accepted))
    assert taken is not None
    return taken


async def check_complete(env: Context, accepted: Accepted) -> None:
    run = await run_of(env, accepted.run)
    totals = await check_counters(env, run)
    rows = await rows_of(env, run)
    batch = await batch_of(env, accepted)
    assert [row.index for row in sorted(rows, key=lambda row: row.index)] == list(range(COUNT))
    assert totals.admitted == run.total == run.planned == batch.total == COUNT
    assert (run.open_batches, batch.status) == (0, BatchStatus.SEALED)
    assert run.ingest_status is IngestStatus.DONE


async def test_an_ingest_admits_every_line_and_seals_the_batch(env: Context) -> None:
    accepted = await submit(env, COUNT)

    walked = await ingest.ingest_batch(env, await acquire_batch(env, accepted))

    assert walked is Ingested.SEALED
    await check_complete(env, accepted)
    assert await work(env, accepted.run) == COUNT


@pytest.mark.slow
@pytest.mark.parametrize("when", list(When))
async def test_an_ingest_interrupted_at_any_call_is_finished_by_the_next(
    env: Context, when: When
) -> None:
    at, goes_on = 0, True
    while goes_on:
        at += 1
        accepted = await submit(env, COUNT, job_id=JobId(a_ulid(1000 + at)))
        fault = Fault(at, when)

        with suppress(Unavailable):
            faulty = with_fault(env, fault)
            taken = await ingest.acquire_batch(faulty, await batch_of(env, accepted))
            assert taken is not None
            await ingest.ingest_batch(faulty, taken)
        batch = await batch_of(env, accepted)
        if batch.status is BatchStatus.OPEN:
            assert (
                await ingest.ingest_batch(env, await acquire_batch(env, accepted))
                is Ingested.SEALED
            )

        await check_complete(env, accepted)
        await work(env, accepted.run)
        assert (await run_of(env, accepted.run)).status is RunStatus.COMPLETED
        goes_on = fault.was_reached
    assert at > 2


async def test_tasks_processed_between_two_ingests_keep_their_state(env: Context) -> None:
    accepted = await submit(env, COUNT)
    taken = await acquire_batch(env, accepted)
    fault = Fault(2, When.AFTER, only="put_chunk")
    with suppress(Unavailable):
        await ingest.ingest_batch(with_fault(env, fault), taken)
    done = await work(env, accepted.run)

    await ingest.ingest_batch(env, await acquire_batch(env, accepted))

    totals = await check_counters(env, accepted.run)
    assert 0 < done < COUNT
    assert totals.done == done
    await check_complete(env, accepted)


async def test_a_seal_after_the_last_settle_completes_the_run(env: Context) -> None:
    accepted = await submit(env, COUNT)
    taken = await acquire_batch(env, accepted)
    fault = Fault(1, When.BEFORE, only="commit")
    with suppress(Unavailable):
        await ingest.ingest_batch(with_fault(env, fault), taken)
    await work(env, accepted.run)
    before = await run_of(env, accepted.run)

    await ingest.ingest_batch(env, await acquire_batch(env, accepted))

    assert (before.status, before.open_batches) == (RunStatus.RUNNING, 1)
    assert (await run_of(env, accepted.run)).status is RunStatus.COMPLETED


async def test_an_ingest_whose_batch_was_taken_over_stops_at_its_next_chunk(env: Context) -> None:
    accepted = await submit(env, COUNT)
    slow = await acquire_batch(env, accepted)
    await acquire_batch(env, accepted)

    assert await ingest.ingest_batch(env, slow) is Ingested.FENCED

    assert await rows_of(env, accepted.run) == []
    assert (await batch_of(env, accepted)).status is BatchStatus.OPEN


async def test_concurrent_ingests_of_a_batch_admit_every_line_once(env: Context) -> None:
    accepted = await submit(env, COUNT)

    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(ingest.ingest_batch, env, await acquire_batch(env, accepted))

    if (await batch_of(env, accepted)).status is BatchStatus.OPEN:
        await ingest.ingest_batch(env, await acquire_batch(env, accepted))
    await check_complete(env, accepted)


async def test_a_batch_is_taken_over_by_one_of_two_processes(env: Context) -> None:
    accepted = await submit(env, COUNT)
    seen = await batch_of(env, accepted)

    first = await ingest.acquire_batch(env, seen)
    second = await ingest.acquire_batch(env, seen)

    assert first is not None
    assert first.epoch == seen.epoch + 1
    assert second is None


async def test_sealing_a_batch_twice_counts_once(env: Context) -> None:
    accepted = await submit(env, COUNT)
    taken = await acquire_batch(env, accepted)
    await ingest.ingest_batch(env, taken)

    assert await ingest.seal(env, taken) is Ingested.SEALED

    await check_complete(env, accepted)


async def test_a_list_of_a_stopping_run_is_abandoned(env: Context) -> None:
    accepted = await submit(env, COUNT)
    taken = await acquire_batch(env, accepted)
    await runs.stop(env, CALLER, accepted.job.job_id)

    assert await ingest.ingest_batch(env, taken) is Ingested.FENCED

    assert (await batch_of(env, accepted)).status is BatchStatus.ABANDONED
    assert await rows_of(env, accepted.run) == []


async def test_no_chunk_is_applied_to_draining_counters(env: Context) -> None:
    accepted = await submit(env, COUNT)
    taken = await acquire_batch(env, accepted)
    run = await run_of(env, accepted.run)
    chunks = ingest._chunks(env, taken, run)
    first, second = await anext(chunks), await anext(chunks)
    assert isinstance(await env.store.put_chunk(first), Applied)
    await runs.stop(env, CALLER, accepted.job.job_id)

    verdict = await env.store.put_chunk(second)
    await chunks.aclose()

    assert not isinstance(verdict, Applied)
    assert len(await rows_of(env, run)) == 100
    await check_counters(env, run)


async def test_a_list_that_cannot_be_read_stops_its_run_as_ingest_failed(
    env: Context, clock: ManualClock
) -> None:
    accepted = await submit(env, COUNT)
    await env.blobs.delete_prefix(f"sources/{accepted.job.job_id}")

    for _ in range(ingestion.ATTEMPTS_WITHOUT_PROGRESS_MAX):
        clock.advance(ingestion.STALLED_S)
        with pytest.raises(Exception, match="sources"):
            await ingest.ingest_batch(env, await acquire_batch(env, accepted))
    given_up = await ingest.acquire_batch(env, await batch_of(env, accepted))
    run = await runs.finish_stop(env, accepted.job.job_id, accepted.run.run_id)

    assert given_up is None
    assert run is not None
    assert (run.status, run.stop_reason) == (RunStatus.STOPPED, "ingest_failed")
    assert (await batch_of(env, accepted)).status is BatchStatus.ABANDONED


async def test_a_list_is_not_given_up_although_processes_keep_taking_it_over(env: Context) -> None:
    """A caller's retry and a starting worker may fence each other off for a while."""
    accepted = await submit(env, COUNT)

    for _ in range(2 * ingestion.ATTEMPTS_WITHOUT_PROGRESS_MAX):
        await acquire_batch(env, accepted)
    walked = await ingest.ingest_batch(env, await acquire_batch(env, accepted))

    assert walked is Ingested.SEALED


async def test_outages_do_not_count_as_failures_of_the_list(
    env: Context, clock: ManualClock
) -> None:
    accepted = await submit(env, COUNT)

    for _ in range(2 * ingestion.ATTEMPTS_WITHOUT_PROGRESS_MAX):
        clock.advance(ingestion.STALLED_S)
        away = with_fault(env, Fault(1, When.BEFORE, only="open"))
        with pytest.raises(Unavailable):
            await reconcile.finish_batch(away, await batch_of(env, accepted))
    walked = await reconcile.finish_batch(env, await batch_of(env, accepted))

    assert walked is Ingested.SEALED
