"""Uploaded lists: a job reads the content that was uploaded before its submit."""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress

import pytest

from conveyor.domain import limits
from conveyor.domain.changes import BatchKey
from conveyor.domain.errors import Conflict, InputNotFound, InvalidArgument
from conveyor.domain.ids import FIRST_BATCH, InputId, JobId, RunId
from conveyor.domain.model import (
    BatchStatus,
    IngestStatus,
    JobInput,
    ListFormat,
    ListSpec,
    RunStatus,
    Task,
    TaskStatus,
)
from conveyor.ports.errors import BlobMissing, Unavailable
from conveyor.usecases.context import Context
from conveyor.usecases.run import ingest, reconcile, rerun, runs
from conveyor.usecases.run.ingest import Ingested
from conveyor.usecases.submit import jobs, upload
from conveyor.usecases.submit.jobs import Accepted, Submission
from conveyor.usecases.submit.upload import slot_key
from tests.builders import CALLER, ManualClock, a_ulid
from tests.usecases.faults import Fault, When, with_fault
from tests.usecases.world import (
    OTHER_CALLER,
    World,
    check_counters,
    rows_of,
    run_of,
    with_config,
    work,
)

TEXT = ListSpec(ListFormat.TEXT)
COUNT = 250
LIST = b"".join(b"https://example.com/%d\n" % number for number in range(COUNT))


@pytest.fixture
def env(world: World) -> Context:
    """A chunk size that makes several chunks of a short list."""
    return with_config(world.env, chunk_tasks=100)


async def _stream(content: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(content), 1000):
        yield content[start : start + 1000]


async def a_slot(env: Context, content: bytes | None = LIST, spec: ListSpec = TEXT) -> JobInput:
    slot = await upload.create(env, CALLER, spec, input_id=InputId(env.new_id()))
    if content is not None:
        await upload.fill(env, slot, _stream(content))
    return slot


async def exists(env: Context, key: str) -> bool:
    try:
        async with aclosing(env.blobs.open(key)) as pieces:
            return [piece async for piece in pieces] != []
    except BlobMissing:
        return False


async def submit(env: Context, slot: JobInput, *, job_id: str | None = None) -> Accepted:
    request = Submission(input_id=slot.input_id)
    return await jobs.submit(env, CALLER, request, job_id=JobId(job_id or env.new_id()))


async def ingest_all(env: Context, accepted: Accepted) -> Ingested:
    batch = await env.store.read(BatchKey(accepted.job.job_id, accepted.run.run_id, FIRST_BATCH))
    assert batch is not None
    return await reconcile.finish_batch(env, batch)


async def rows_in_order(env: Context, accepted: Accepted) -> list[Task]:
    return sorted(await rows_of(env, accepted.run), key=lambda row: row.index)


async def test_an_uploaded_list_becomes_a_task_per_line(env: Context) -> None:
    accepted = await submit(env, await a_slot(env))
    before = await run_of(env, accepted.run)

    assert await ingest_all(env, accepted) is Ingested.SEALED

    run = await run_of(env, accepted.run)
    rows = await rows_in_order(env, accepted)
    assert (accepted.is_later, accepted.accepted) == (True, COUNT)
    assert (before.planned, before.total) == (COUNT, 0)
    assert (before.ingest_status, run.ingest_status) == (IngestStatus.PENDING, IngestStatus.DONE)
    assert [row.url for row in rows] == LIST.decode().split()
    assert (run.planned, run.total, run.open_batches) == (COUNT, COUNT, 0)
    assert await work(env, run) == COUNT
    assert (await run_of(env, run)).status is RunStatus.COMPLETED


@pytest.mark.parametrize("content", [LIST, gzip.compress(LIST)], ids=["plain", "gzip"])
@pytest.mark.parametrize("when", list(When))
@pytest.mark.slow
async def test_an_ingest_interrupted_at_any_call_is_finished_by_the_next(
    env: Context, when: When, content: bytes
) -> None:
    slot = await a_slot(env, content)
    at, goes_on = 0, True
    while goes_on:
        at += 1
        accepted = await submit(env, slot, job_id=a_ulid(1000 + at))
        fault = Fault(at, when)

        with suppress(Unavailable):
            await ingest_all(with_fault(env, fault), accepted)
        await ingest_all(env, accepted)

        run = await run_of(env, accepted.run)
        totals = await check_counters(env, run)
        assert totals.admitted == run.total == run.planned == COUNT
        assert [row.index for row in await rows_in_order(env, accepted)] == list(range(COUNT))
        goes_on = fault.was_reached
    assert at > 5


@pytest.mark.parametrize("when", list(When))
@pytest.mark.slow
async def test_a_submit_interrupted_at_any_call_is_finished_by_a_retry(
    env: Context, when: When
) -> None:
    slot = await a_slot(env)
    at, goes_on = 0, True
    while goes_on:
        at += 1
        job_id = a_ulid(1000 + at)
        fault = Fault(at, when)

        with suppress(Unavailable):
            await submit(with_fault(env, fault), slot, job_id=job_id)
        accepted = await submit(env, slot, job_id=job_id)

        assert (accepted.job.job_id, accepted.accepted) == (job_id, COUNT)
        assert await ingest_all(env, accepted) is Ingested.SEALED
        goes_on = fault.was_reached
    assert at > 3


async def test_an_upload_after_the_submit_does_not_change_the_job(env: Context) -> None:
    slot = await a_slot(env)
    first = await submit(env, slot)
    await upload.fill(env, slot, _stream(b"https://example.com/other\n"))
    second = await submit(env, slot)

    await ingest_all(env, first)
    await ingest_all(env, second)

    assert [row.url for row in await rows_in_order(env, first)] == LIST.decode().split()
    assert [row.url for row in await rows_in_order(env, second)] == ["https://example.com/other"]


async def test_deleting_one_of_two_jobs_with_the_same_upload_keeps_the_others_copy(
    env: Context,
) -> None:
    slot = await a_slot(env)
    first, second = await submit(env, slot), await submit(env, slot)

    await jobs.delete(env, CALLER, first.job.job_id)
    await reconcile.delete_due(env)

    assert not await exists(env, f"sources/{first.job.job_id}/{first.run.run_id}/0")
    assert await ingest_all(env, second) is Ingested.SEALED
    assert len(await rows_of(env, second.run)) == COUNT


async def test_a_retried_submit_returns_the_same_job_after_its_upload_slot_has_expired(
    env: Context, clock: ManualClock
) -> None:
    slot = await a_slot(env)
    accepted = await submit(env, slot)
    clock.advance(limits.INPUT_TTL_S)

    again = await submit(env, slot, job_id=accepted.job.job_id)

    assert again.run.run_id == accepted.run.run_id
    assert again.accepted == COUNT


async def test_an_invalid_line_becomes_a_failed_task(env: Context) -> None:
    content = (
        b"https://example.com/0\nftp://user:pw@example.com/1?q\nhttps://exa\xff\nhttps://e.com"
    )
    accepted = await submit(env, await a_slot(env, content))

    await ingest_all(env, accepted)

    rows = await rows_in_order(env, accepted)
    assert [row.status for row in rows] == [
        TaskStatus.PENDING,
        TaskStatus.FAILED,
        TaskStatus.FAILED,
        TaskStatus.PENDING,
    ]
    assert [row.problem.code for row in rows if row.problem] == [
        "unsupported_scheme",
        "invalid_encoding",
    ]
    assert rows[1].url == "ftp"
    totals = await check_counters(env, accepted.run)
    assert (totals.done, totals.failed) == (2, 2)
    assert await work(env, accepted.run) == 2
    assert (await run_of(env, accepted.run)).status is RunStatus.COMPLETED


async def test_a_list_of_only_invalid_lines_completes(env: Context) -> None:
    accepted = await submit(env, await a_slot(env, b"a\nb\nc\n"))

    await ingest_all(env, accepted)

    run = await run_of(env, accepted.run)
    assert (run.status, run.total) == (RunStatus.COMPLETED, 3)


async def test_the_estimated_total_of_a_long_list_is_corrected_by_its_ingest(
    env: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "UPLOAD_EXACT_COUNT_MAX", 50)
    monkeypatch.setattr("conveyor.usecases.submit.upload._SLICE_BYTES", 500)
    content = LIST.replace(b"\n", b"\r\n\r\n") + b"https://example.com/last"

    accepted = await submit(env, await a_slot(env, content))
    planned = accepted.run.planned
    await ingest_all(env, accepted)

    run = await run_of(env, accepted.run)
    assert COUNT + 1 < planned == accepted.accepted <= 2 * COUNT + 2
    assert run.planned == run.total == COUNT + 1


@pytest.mark.parametrize(
    ("limit", "content", "words"),
    [
        ("TASKS_MAX", LIST, "more than 120 lines"),
        ("LIST_BYTES_MAX", LIST, "more than 120 bytes"),
        ("LIST_BYTES_MAX", gzip.compress(b"\n" * 10_000_000), "more than 120 bytes"),
    ],
    ids=["lines", "bytes", "bomb"],
)
async def test_a_list_that_is_too_large_stops_its_run_with_that_reason(
    env: Context, monkeypatch: pytest.MonkeyPatch, limit: str, content: bytes, words: str
) -> None:
    # A list that cannot be counted is planned with the maximum length, which is short in this test.
    monkeypatch.setattr(limits, "TASKS_MAX", 1_000)
    monkeypatch.setattr(limits, limit, 120)
    accepted = await submit(env, await a_slot(env, content))

    walked = await ingest_all(env, accepted)
    await runs.finish_stop(env, accepted.job.job_id, accepted.run.run_id)

    run = await run_of(env, accepted.run)
    batch = await env.store.read(BatchKey(run.job_id, run.run_id, FIRST_BATCH))
    assert walked is Ingested.GIVEN_UP
    assert (run.status, run.stop_reason) == (RunStatus.STOPPED, "ingest_failed")
    assert words in (run.failure_detail or "")
    assert batch is not None
    assert batch.status is BatchStatus.ABANDONED
    await check_counters(env, run)


async def test_a_staged_copy_that_was_changed_stops_the_run(env: Context) -> None:
    accepted = await submit(env, await a_slot(env))
    key = f"sources/{accepted.job.job_id}/{accepted.run.run_id}/0"
    await env.blobs.put(key, [LIST[:-23]])

    assert await ingest_all(env, accepted) is Ingested.GIVEN_UP


async def test_a_rerun_of_a_run_stopped_before_its_list_was_ingested_reads_it_again(
    env: Context,
) -> None:
    accepted = await submit(env, await a_slot(env))
    fault = Fault(2, When.BEFORE, only="put_chunk")
    with suppress(Unavailable):
        await ingest_all(with_fault(env, fault), accepted)
    await runs.stop(env, CALLER, accepted.job.job_id)

    again = await rerun.rerun(
        env, CALLER, accepted.job.job_id, retry=None, run_id=RunId(env.new_id())
    )
    for batch in await ingest.open_batches_of(env, again.run.job_id, again.run.run_id):
        await reconcile.finish_batch(env, batch)

    assert (again.retried, again.inherited) == (COUNT, 0)
    assert len(await rows_of(env, again.run)) == COUNT


@pytest.mark.parametrize(
    "content",
    [b"", b"\n \r\n# nothing\n", gzip.compress(b""), gzip.compress(LIST)[:-5]],
    ids=["empty", "blank", "empty gzip", "damaged"],
)
async def test_an_empty_or_damaged_list_is_refused_and_leaves_no_body(
    env: Context, content: bytes
) -> None:
    slot = await a_slot(env, content)
    job_id = env.new_id()

    with pytest.raises(InvalidArgument):
        await submit(env, slot, job_id=job_id)

    assert await env.blobs.delete_prefix(f"jobs/{job_id}") == 0


async def test_a_directly_uploaded_list_that_is_too_large_is_refused_and_leaves_no_body(
    env: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = await a_slot(env)
    job_id = env.new_id()
    monkeypatch.setattr(limits, "UPLOAD_BYTES_MAX", len(LIST) - 1)

    with pytest.raises(InvalidArgument, match="bytes"):
        await submit(env, slot, job_id=job_id)

    assert await env.blobs.delete_prefix(f"jobs/{job_id}") == 0


async def test_an_upload_slot_without_an_upload_is_refused(env: Context) -> None:
    with pytest.raises(Conflict) as caught:
        await submit(env, await a_slot(env, None))

    assert caught.value.code == "file_input_not_uploaded"


async def test_unknown_foreign_and_expired_upload_slots_get_the_same_error(
    env: Context, clock: ManualClock
) -> None:
    slot = await a_slot(env)
    token = upload.upload_token(env, slot)
    answers = []
    for caller, input_id in [(CALLER, a_ulid(7)), (OTHER_CALLER, slot.input_id), (CALLER, "../x")]:
        with pytest.raises(InputNotFound) as caught:
            await upload.own_input(env, caller, input_id)
        answers.append(str(caught.value))
    clock.advance(limits.INPUT_TTL_S)
    with pytest.raises(InputNotFound) as caught:
        await upload.own_input(env, CALLER, slot.input_id)
    answers.append(str(caught.value))
    with pytest.raises(InputNotFound) as caught:
        await upload.input_by_token(env, slot.input_id, token)
    answers.append(str(caught.value))

    assert len(set(answers)) == 1


async def test_expired_upload_slots_and_their_uploads_are_removed_and_others_kept(
    env: Context, clock: ManualClock
) -> None:
    old = await a_slot(env)
    clock.advance(limits.INPUT_TTL_S)
    young = await a_slot(env)
    early = await upload.remove_expired(env)
    clock.advance(limits.INPUT_GRACE_S)

    removed = [await upload.remove_expired(env), await upload.remove_expired(env)]

    assert (early, removed) == (0, [1, 0])
    assert not await exists(env, slot_key(old.input_id))
    assert await exists(env, slot_key(young.input_id))
