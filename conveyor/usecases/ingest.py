"""Ingest: walks the source of one open batch into its run, step by step (SPEC.md 4.3).

Safe to run twice, to be cut off anywhere and to be taken over: rows are only inserted, counts and
checkpoint move together, and the batch's epoch fences off whoever came before.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from enum import Enum

import msgspec

from conveyor.domain import endings, ingestion
from conveyor.domain.changes import Applied, Chunk, JobKey, RunKey
from conveyor.domain.ids import JobId, RunId, TaskId
from conveyor.domain.inputs import UploadedList
from conveyor.domain.lifecycle import RUN_LIVE
from conveyor.domain.lists import ListUnusable
from conveyor.domain.model import Batch, BatchStatus, RowsOf, Run, StagedList, TaskSpec
from conveyor.domain.queries import BatchesOf
from conveyor.usecases import lists, runs, staging
from conveyor.usecases.ahead import use_each
from conveyor.usecases.env import Env
from conveyor.usecases.walking import pages_of

_SPEC = msgspec.json.Decoder(TaskSpec)


class Ingested(Enum):
    """How a walk ended."""

    SEALED = "every line is in"
    FENCED = "somebody else has taken it over, or the run has ended"
    GIVEN_UP = "the list as a whole cannot be taken"


async def take_over(env: Env, batch: Batch) -> Batch | None:
    """Makes an open batch ours; None when somebody was quicker, or it is over.

    A batch that makes no progress however often it is taken up stops its run with a reason.
    """
    if ingestion.is_hopeless(batch):
        await give_up(env, batch, "The list could not be read, however often it was tried.")
        return None
    verdict = await env.commit(ingestion.take_over(batch, now=env.now()))
    if not isinstance(verdict, Applied):
        return None
    (taken,) = verdict.rows
    assert isinstance(taken, Batch)
    return taken


async def give_up(env: Env, batch: Batch, detail: str) -> None:
    """The list cannot be read: the run is stopped and says so."""
    run = await env.store.read(RunKey(batch.job_id, batch.run_id))
    if run is not None and run.status in RUN_LIVE:
        change = endings.request_stop(
            run, reason=endings.INGEST_FAILED, detail=detail, now=env.now()
        )
        await env.commit(change)
        await env.signals.run_changed(run.job_id, run.run_id)
    await env.commit(ingestion.abandon(batch, now=env.now()))


async def walk(env: Env, batch: Batch) -> Ingested:
    """Ingests what is left of the batch, seals it, and looks whether the run is complete."""
    run = await env.store.read(RunKey(batch.job_id, batch.run_id))
    if run is None or run.status not in RUN_LIVE or run.stop_requested_at is not None:
        await env.commit(ingestion.abandon(batch, now=env.now()))
        return Ingested.FENCED
    try:
        if not await _put_chunks(env, batch, run):
            return Ingested.FENCED
    except ListUnusable as error:
        await give_up(env, batch, str(error))
        return Ingested.GIVEN_UP
    sealed = await seal(env, batch)
    await runs.look(env, batch.job_id, batch.run_id)
    return sealed


async def _put_chunks(env: Env, batch: Batch, run: Run) -> bool:
    """Whether all of them are in; not if somebody else has taken over."""

    async def put(chunk: Chunk) -> bool:
        verdict = await env.store.put_chunk(chunk)
        if not isinstance(verdict, Applied):
            return False
        await env.signals.run_changed(run.job_id, run.run_id)
        return True

    return await use_each(_chunks(env, batch, run), put)


async def seal(env: Env, batch: Batch) -> Ingested:
    current = await env.store.read(ingestion.batch_key(batch))
    run = await env.store.read(RunKey(batch.job_id, batch.run_id))
    if current is None or run is None or current.epoch != batch.epoch:
        return Ingested.FENCED
    if current.status is BatchStatus.SEALED:
        return Ingested.SEALED
    verdict = await env.commit(ingestion.seal(current, run, now=env.now()))
    return Ingested.SEALED if isinstance(verdict, Applied) else Ingested.FENCED


async def open_batches_of(env: Env, job_id: JobId, run_id: RunId) -> list[Batch]:
    batches = await env.store.find(BatchesOf(job_id=job_id, run_id=run_id))
    return [batch for batch in batches if batch.status is BatchStatus.OPEN]


def _chunks(env: Env, batch: Batch, run: Run) -> AsyncGenerator[Chunk, None]:
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
    env: Env, batch: Batch, run: Run, source: StagedList
) -> AsyncGenerator[Chunk, None]:
    start = int(batch.cursor or 0)
    async with aclosing(_groups(env, source.key, start)) as groups:
        async for specs, cursor in groups:
            chunk = ingestion.chunk_of_specs(batch, run, specs, cursor=str(cursor), now=env.now())
            yield chunk
            batch = _advanced(batch, chunk)


async def _chunks_of_upload(
    env: Env, batch: Batch, run: Run, source: UploadedList
) -> AsyncGenerator[Chunk, None]:
    job = await env.store.read(JobKey(batch.job_id))
    if job is None:
        return
    behind = 0
    async with aclosing(lists.groups(env, source)) as groups:
        async for lines in groups:
            start, behind = behind, behind + len(lines)
            specs = [
                staging.judge(env, job, index, line.draft)
                for index, line in enumerate(lines, start)
                if index >= batch.done
            ]
            if specs:
                cursor = str(behind)
                chunk = ingestion.chunk_of_specs(batch, run, specs, cursor=cursor, now=env.now())
                yield chunk
                batch = _advanced(batch, chunk)


async def _groups(
    env: Env, key: str, start: int
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
    env: Env, batch: Batch, run: Run, source: RowsOf
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
