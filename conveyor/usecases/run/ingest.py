"""Ingest: walks the source of one open batch into its run, step by step (SPEC.md 4.3).

Safe to run twice, to be cut off anywhere and to be taken over: rows are only inserted, counts and
checkpoint move together, and the batch's epoch fences off whoever came before.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from enum import Enum
from typing import TypeVar

import msgspec
import trio

from conveyor.domain.changes import Applied, Chunk, JobKey, RunKey
from conveyor.domain.errors import ConveyorError
from conveyor.domain.ids import JobId, RunId, TaskId
from conveyor.domain.lifecycle import RUN_LIVE
from conveyor.domain.model import Batch, BatchStatus, RowsOf, Run, StagedList, TaskSpec
from conveyor.domain.queries import BatchesOf
from conveyor.domain.run import ingestion, termination
from conveyor.domain.submit.list_parser import ListUnusable
from conveyor.domain.submit.upload import UploadedList
from conveyor.usecases.context import Context
from conveyor.usecases.lookup import pages_of
from conveyor.usecases.run import runs
from conveyor.usecases.submit import staging, upload

_SPEC = msgspec.json.Decoder(TaskSpec)


class Ingested(Enum):
    """How a walk ended."""

    SEALED = "every line is in"
    FENCED = "somebody else has taken it over, or the run has ended"
    GIVEN_UP = "the list as a whole cannot be taken"


async def acquire_batch(env: Context, batch: Batch) -> Batch | None:
    """Makes an open batch ours; None when somebody was quicker, or it is over.

    A batch that makes no progress however often it is taken up stops its run with a reason.
    """
    if ingestion.failed_too_often(batch):
        await fail_batch(env, batch, "The list could not be read, however often it was tried.")
        return None
    verdict = await env.commit(ingestion.acquire_batch(batch, now=env.now()))
    if not isinstance(verdict, Applied):
        return None
    (taken,) = verdict.rows
    assert isinstance(taken, Batch)
    return taken


async def fail_batch(env: Context, batch: Batch, detail: str) -> None:
    """The list cannot be read: the run is stopped and says so."""
    run = await env.store.read(RunKey(batch.job_id, batch.run_id))
    if run is not None and run.status in RUN_LIVE:
        change = termination.request_stop(
            run, reason=termination.INGEST_FAILED, detail=detail, now=env.now()
        )
        await env.commit(change)
        await env.signals.run_changed(run.job_id, run.run_id)
    await env.commit(ingestion.abandon(batch, now=env.now()))


async def ingest_batch(env: Context, batch: Batch) -> Ingested:
    """Ingests what is left of the batch, seals it, and looks whether the run is complete."""
    run = await env.store.read(RunKey(batch.job_id, batch.run_id))
    if run is None or run.status not in RUN_LIVE or run.stop_requested_at is not None:
        await env.commit(ingestion.abandon(batch, now=env.now()))
        return Ingested.FENCED
    try:
        if not await _put_chunks(env, batch, run):
            return Ingested.FENCED
    except ListUnusable as error:
        await fail_batch(env, batch, str(error))
        return Ingested.GIVEN_UP
    sealed = await seal(env, batch)
    await runs.complete_if_done(env, batch.job_id, batch.run_id)
    return sealed


async def _put_chunks(env: Context, batch: Batch, run: Run) -> bool:
    """Whether all of them are in; not if somebody else has taken over."""

    async def put(chunk: Chunk) -> bool:
        verdict = await env.store.put_chunk(chunk)
        if not isinstance(verdict, Applied):
            return False
        await env.signals.run_changed(run.job_id, run.run_id)
        return True

    return await prefetch_each(_chunks(env, batch, run), put)


async def seal(env: Context, batch: Batch) -> Ingested:
    current = await env.store.read(ingestion.batch_key(batch))
    run = await env.store.read(RunKey(batch.job_id, batch.run_id))
    if current is None or run is None or current.epoch != batch.epoch:
        return Ingested.FENCED
    if current.status is BatchStatus.SEALED:
        return Ingested.SEALED
    verdict = await env.commit(ingestion.seal(current, run, now=env.now()))
    return Ingested.SEALED if isinstance(verdict, Applied) else Ingested.FENCED


async def open_batches_of(env: Context, job_id: JobId, run_id: RunId) -> list[Batch]:
    batches = await env.store.find(BatchesOf(job_id=job_id, run_id=run_id))
    return [batch for batch in batches if batch.status is BatchStatus.OPEN]


def _chunks(env: Context, batch: Batch, run: Run) -> AsyncGenerator[Chunk, None]:
    match batch.source:
        case StagedList():
            return _chunks_of_list(env, batch, run, batch.source)
        case UploadedList():
            return _chunks_of_upload(env, batch, run, batch.source)
        case RowsOf():
            return _chunks_of_rows(env, batch, run, batch.source)
        case None:
            raise AssertionError("an open batch has a source")


async def _chunks_of_list(
    env: Context, batch: Batch, run: Run, source: StagedList
) -> AsyncGenerator[Chunk, None]:
    start = int(batch.cursor or 0)
    async with aclosing(_groups(env, source.key, start)) as groups:
        async for specs, cursor in groups:
            chunk = ingestion.chunk_of_specs(batch, run, specs, cursor=str(cursor), now=env.now())
            yield chunk
            batch = _advanced(batch, chunk)


async def _chunks_of_upload(
    env: Context, batch: Batch, run: Run, source: UploadedList
) -> AsyncGenerator[Chunk, None]:
    job = await env.store.read(JobKey(batch.job_id))
    if job is None:
        return
    behind = 0
    async with aclosing(upload.groups(env, source)) as groups:
        async for lines in groups:
            start, behind = behind, behind + len(lines)
            specs = [
                staging.validate(env, job, index, line.draft)
                for index, line in enumerate(lines, start)
                if index >= batch.done
            ]
            if specs:
                cursor = str(behind)
                chunk = ingestion.chunk_of_specs(batch, run, specs, cursor=cursor, now=env.now())
                yield chunk
                batch = _advanced(batch, chunk)


async def _groups(
    env: Context, key: str, start: int
) -> AsyncGenerator[tuple[list[TaskSpec], int], None]:
    """Fixed counts of lines, each with the byte position behind it."""
    specs: list[TaskSpec] = []
    position, rest = start, b""
    async with aclosing(env.blobs.open(key, start=start)) as pieces:
        async for piece in pieces:
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                specs.append(_SPEC.decode(line))
                position += len(line) + 1
                if len(specs) == env.policy.chunk_tasks:
                    yield specs, position
                    specs = []
    if specs:
        yield specs, position


async def _chunks_of_rows(
    env: Context, batch: Batch, run: Run, source: RowsOf
) -> AsyncGenerator[Chunk, None]:
    after = TaskId(batch.cursor) if batch.cursor else None
    previous = msgspec.structs.replace(run, run_id=source.run_id)
    async with aclosing(pages_of(env, previous, after=after)) as pages:
        async for page in pages:
            rows = [row for row in page if source.batch_id in (None, row.batch_id)]
            if rows:
                chunk = ingestion.chunk_of_rows(batch, run, rows, now=env.now())
                yield chunk
                batch = _advanced(batch, chunk)


def _advanced(batch: Batch, chunk: Chunk) -> Batch:
    """The batch as it stands once the chunk is in."""
    return msgspec.structs.replace(batch, **chunk.values)


# Ahead: the next thing is made while the last one is used.


T = TypeVar("T")


async def prefetch_each(
    source: AsyncGenerator[T, None], use: Callable[[T], Awaitable[bool]]
) -> bool:
    """Uses one after the other; ends, and answers False, as soon as `use` does.

    At most one that is not used yet has been made, and another is in the making. What either side
    raises comes through by itself, not in a group.
    """
    made, taken = trio.open_memory_channel[T](0)
    failures: list[ConveyorError | ValueError] = []
    are_all_made = are_all_used = False

    async def make() -> None:
        nonlocal are_all_made
        with made:  # Not async: a cancellation there would hide what was raised.
            try:
                async with aclosing(source) as things:
                    async for thing in things:
                        await made.send(thing)
                are_all_made = True
            except (ConveyorError, ValueError) as error:
                failures.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(make)
        try:
            async for thing in taken:
                if not await use(thing):
                    nursery.cancel_scope.cancel()
                    break
            else:
                are_all_used = True
        except (ConveyorError, ValueError) as error:
            failures.append(error)
            nursery.cancel_scope.cancel()
    if failures:
        raise failures[0]
    return are_all_made and are_all_used
