"""Ingest: writes the source of one open batch into its run, chunk by chunk (SPEC.md 4.3).

Ingest may run twice, be interrupted anywhere and be taken over. Rows are only inserted, counters
and checkpoint move in one change, and the batch's epoch fences off the previous ingester.
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
from conveyor.domain.lifecycle import RUN_LIVE, accepts_settles
from conveyor.domain.model import (
    Batch,
    BatchStatus,
    RowsOf,
    Run,
    StagedList,
    TaskSpec,
    UploadedList,
)
from conveyor.domain.queries import BatchesOf
from conveyor.domain.run import ingestion, termination
from conveyor.domain.submit.list_parser import ListUnusable
from conveyor.usecases.context import Context
from conveyor.usecases.lookup import pages_of
from conveyor.usecases.run import runs
from conveyor.usecases.submit import staging, upload
from conveyor.usecases.submit.duplicates import DuplicateFinder

_SPEC = msgspec.json.Decoder(TaskSpec)


class Ingested(Enum):
    """How the ingest of a batch ended."""

    SEALED = "every line is ingested"
    FENCED = "another ingester has taken it over, or the run has ended"
    GIVEN_UP = "the list as a whole cannot be ingested"


async def acquire_batch(env: Context, batch: Batch) -> Batch | None:
    """Acquires an open batch by raising its epoch. Returns None if another ingester was faster or
    the batch is not open.

    A batch that made no progress in several attempts stops its run with a reason.
    """
    if ingestion.failed_too_often(batch):
        await fail_batch(env, batch, "The list could not be read, however often it was tried.")
        return None
    verdict = await env.commit(ingestion.acquire_batch(batch, now=env.now()))
    if not isinstance(verdict, Applied):
        return None
    (acquired,) = verdict.rows
    assert isinstance(acquired, Batch)
    return acquired


async def fail_batch(env: Context, batch: Batch, detail: str) -> None:
    """Stops the run of a list that cannot be read, and abandons the batch."""
    run = await env.store.read(RunKey(batch.job_id, batch.run_id))
    if run is not None and run.status in RUN_LIVE:
        change = termination.request_stop(
            run, reason=termination.INGEST_FAILED, detail=detail, now=env.now()
        )
        await env.commit(change)
        await env.signals.run_changed(run.job_id, run.run_id)
    # Last: if this process stops before, the batch is still open and the next ingester repeats
    # both.
    await env.commit(ingestion.abandon(batch, now=env.now()))


async def ingest_batch(env: Context, batch: Batch) -> Ingested:
    """Ingests the rest of the batch, seals it, and checks whether the run is complete."""
    run = await env.store.read(RunKey(batch.job_id, batch.run_id))
    # The list will never be needed. Abandon the batch, or the sweeper would find it again and
    # again.
    if run is None or not accepts_settles(run):
        await env.commit(ingestion.abandon(batch, now=env.now()))
        return Ingested.FENCED
    try:
        if not await _put_chunks(env, batch, run):
            return Ingested.FENCED
    except ListUnusable as error:
        await fail_batch(env, batch, str(error))
        return Ingested.GIVEN_UP
    sealed = await seal(env, batch)
    # All tasks may have ended before the seal, and then no later settle checks for completion.
    await runs.complete_if_done(env, batch.job_id, batch.run_id)
    return sealed


async def _put_chunks(env: Context, batch: Batch, run: Run) -> bool:
    """Writes all chunks. Returns False if another ingester has taken over."""

    async def put(chunk: Chunk) -> bool:
        verdict = await env.store.put_chunk(chunk)
        if not isinstance(verdict, Applied):
            return False
        # So that the poller does not sleep while the list is still being ingested. Where each
        # signal is billed, the first one must do: the poller looks again within a second.
        if chunk.done_before == batch.done or not env.config.shares_runs:
            await env.signals.run_changed(run.job_id, run.run_id, run.planned)
        return True

    return await prefetch_each(_chunks(env, batch, run), put)


async def seal(env: Context, batch: Batch) -> Ingested:
    current = await env.store.read(ingestion.batch_key(batch))
    run = await env.store.read(RunKey(batch.job_id, batch.run_id))
    # The row is read again, because the chunks have moved its counters and checkpoint.
    if current is None or run is None or current.epoch != batch.epoch:
        return Ingested.FENCED
    # An earlier seal of unknown outcome was applied.
    if current.status is BatchStatus.SEALED:
        return Ingested.SEALED
    verdict = await env.commit_with_events(ingestion.seal(current, run, now=env.now()))
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
    job = await env.store.read(JobKey(batch.job_id))
    if job is None:
        return
    finder = DuplicateFinder(env, job, run, (source.origin_run_id, source.origin_batch_id))
    # The checkpoint of a staged list is a byte position, so a resumed ingest skips nothing.
    start = int(batch.cursor or 0)
    async with aclosing(_groups(env, source.key, start)) as groups:
        async for specs, cursor in groups:
            identities = await finder.identities(specs)
            chunk = ingestion.chunk_of_specs(
                batch, run, specs, identities, cursor=str(cursor), now=env.now()
            )
            yield chunk
            batch = _advance(batch, chunk)


async def _chunks_of_upload(
    env: Context, batch: Batch, run: Run, source: UploadedList
) -> AsyncGenerator[Chunk, None]:
    job = await env.store.read(JobKey(batch.job_id))
    if job is None:
        return
    finder = DuplicateFinder(env, job, run, (source.origin_run_id, source.origin_batch_id))
    # An uploaded list has no usable byte position (gzip), so a resumed ingest reads it from the
    # start and skips the lines that are done.
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
                identities = await finder.identities(specs)
                chunk = ingestion.chunk_of_specs(
                    batch, run, specs, identities, cursor=str(behind), now=env.now()
                )
                yield chunk
                batch = _advance(batch, chunk)


async def _groups(
    env: Context, key: str, start: int
) -> AsyncGenerator[tuple[list[TaskSpec], int], None]:
    """Yields chunks of specs, each with the byte position after its last line."""
    specs: list[TaskSpec] = []
    position, rest = start, b""
    async with aclosing(env.blobs.open(key, start=start)) as pieces:
        async for piece in pieces:
            # A piece may end within a line: keep the incomplete part for the next piece.
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                specs.append(_SPEC.decode(line))
                position += len(line) + 1
                if len(specs) == env.config.chunk_tasks:
                    yield specs, position
                    specs = []
    if specs:
        yield specs, position


async def _chunks_of_rows(
    env: Context, batch: Batch, run: Run, source: RowsOf
) -> AsyncGenerator[Chunk, None]:
    after = TaskId(batch.cursor) if batch.cursor else None
    # Only the ids and the shard count are used, and runs of one job have the same shard count.
    previous = msgspec.structs.replace(run, run_id=source.run_id)
    async with aclosing(pages_of(env, previous, after=after)) as pages:
        async for page in pages:
            rows = [row for row in page if source.batch_id in (None, row.batch_id)]
            if rows:
                chunk = ingestion.chunk_of_rows(batch, run, rows, now=env.now())
                yield chunk
                batch = _advance(batch, chunk)


def _advance(batch: Batch, chunk: Chunk) -> Batch:
    """Returns the batch as it is after the chunk is written."""
    return msgspec.structs.replace(batch, **chunk.values)


# Prefetch: the next item is made while the last one is used.


T = TypeVar("T")


async def prefetch_each(
    source: AsyncGenerator[T, None], use: Callable[[T], Awaitable[bool]]
) -> bool:
    """Uses the items one after the other. Stops and returns False as soon as `use` returns False.

    At most one made item waits, and one more is being made. Errors of either side are raised as
    they are, not in an exception group.
    """
    # No buffer: `send` returns when the item is received, so memory holds two chunks at most.
    sender, receiver = trio.open_memory_channel[T](0)
    failures: list[ConveyorError | ValueError] = []
    are_all_made = are_all_used = False

    async def make() -> None:
        nonlocal are_all_made
        # Not `async with`: a cancellation at its checkpoint would hide the error that was raised.
        with sender:
            try:
                async with aclosing(source) as things:
                    async for thing in things:
                        await sender.send(thing)
                are_all_made = True
            except (ConveyorError, ValueError) as error:
                failures.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(make)
        try:
            async for thing in receiver:
                if not await use(thing):
                    # The maker may wait in `send` for a receiver that will not come.
                    nursery.cancel_scope.cancel()
                    break
            else:
                are_all_used = True
        except (ConveyorError, ValueError) as error:
            failures.append(error)
            nursery.cancel_scope.cancel()
    if failures:
        raise failures[0]
    # Both are needed: the channel also closes when the maker fails or is cancelled.
    return are_all_made and are_all_used
