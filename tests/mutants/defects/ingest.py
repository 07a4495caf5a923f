"""Mutants of ingest: rows that are overwritten, lost, renumbered or counted wrongly
(SPEC.md 4.3)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from itertools import compress
from typing import Any

import msgspec

from conveyor.domain.changes import Change, Chunk, Guard, JobKey, Update
from conveyor.domain.ids import FIRST_BATCH, BatchId, InputId, RunId, TaskId
from conveyor.domain.model import (
    Batch,
    CounterState,
    Job,
    Run,
    Task,
    TaskSpec,
    UploadedList,
)
from conveyor.domain.run import ingestion
from conveyor.domain.submit.admission import Identity
from conveyor.simulation.profiles import SHORT_LISTS
from conveyor.simulation.swaps import combine, original_of, swap
from conveyor.usecases.context import Context
from conveyor.usecases.submit import staging, upload
from conveyor.usecases.submit.upload import slot_key
from tests.mutants.mutant import Mutant


def _overwrite_in_memory(put_chunk: Any) -> Any:
    async def mutated(self: Any, chunk: Chunk) -> Any:
        self._tasks.update({(task.run_id, task.task_id): task for task in chunk.tasks})
        return await put_chunk(self, chunk)

    return mutated


def _overwrite_rows(put_chunk: Any) -> Any:
    def mutated(connection: Any, chunk: Chunk, now: float) -> Any:
        table = original_of("conveyor.engines.sqlite.store:_TASKS")
        insert: str = original_of("conveyor.engines.sqlite.sql:insert_sql")(table)
        replace = insert.replace("INSERT", "INSERT OR REPLACE").partition(" ON CONFLICT")[0]
        connection.executemany(replace, map(table.to_row, chunk.tasks))
        return put_chunk(connection, chunk, now)

    return mutated


def _overwrite_items(_: Any) -> Any:
    async def mutated(self: Any, items: Sequence[Any]) -> list[int]:
        puts = [{"PutRequest": {"Item": item}} for item in items]
        answer = await self.call("BatchWriteItem", {"RequestItems": {self.name: puts}})
        left = answer.get("UnprocessedItems", {}).get(self.name, ())
        return [number for number, put in enumerate(puts) if put in left]

    return mutated


def _remove_fence(_: Any) -> Any:
    def mutated(chunk: Chunk) -> Guard:
        return Guard()

    return property(mutated)


def _set_total(seal: Any) -> Any:
    def mutated(batch: Batch, run: Run, *, now: float) -> Change:
        sealed, counted, *event_writes = seal(batch, run, now=now).writes
        assert isinstance(counted, Update)
        deltas = dict(counted.deltas)
        values = {**counted.values, "total": deltas.pop("total")}
        counted = msgspec.structs.replace(counted, values=values, deltas=deltas)
        return Change((sealed, counted, *event_writes))

    return mutated


def _read_from_slot(take: Any) -> Any:
    async def mutated(
        env: Context, job: Job, run_id: RunId, input_id: str
    ) -> tuple[UploadedList, int]:
        source, total = await take(env, job, run_id, input_id)
        return msgspec.structs.replace(source, key=slot_key(InputId(input_id))), total

    return mutated


def _drop_invalid_lines(chunk_of_specs: Any) -> Any:
    def mutated(
        batch: Batch,
        run: Run,
        specs: Sequence[TaskSpec],
        identities: Sequence[Identity] | None = None,
        *,
        cursor: str,
        now: float,
    ) -> Chunk:
        is_good = [spec.problem is None for spec in specs]
        lines = None if identities is None else [*compress(identities, is_good)]
        good = [*compress(specs, is_good)]
        chunk: Chunk = chunk_of_specs(batch, run, good, lines, cursor=cursor, now=now)
        return chunk

    return mutated


def _pass_any_gate(chunk: Any) -> Any:
    def mutated(
        batch: Batch,
        run: Run,
        tasks: Sequence[Task],
        *,
        cursor: str,
        sources: frozenset[RunId],
        now: float,
    ) -> Chunk:
        step: Chunk = chunk(batch, run, tasks, cursor=cursor, sources=sources, now=now)
        return msgspec.structs.replace(step, gate_in=frozenset(CounterState))

    return mutated


def _omit_batch(task_ids: Any) -> Any:
    def mutated(run_id: RunId, batch_id: BatchId, indexes: Iterable[int]) -> list[TaskId]:
        ids: list[TaskId] = task_ids(run_id, FIRST_BATCH, indexes)
        return ids

    return mutated


def _number_from_zero(_: Any) -> Any:
    async def mutated(
        env: Context, batch: Batch, run: Run, source: UploadedList
    ) -> AsyncGenerator[Chunk, None]:
        job = await env.store.read(JobKey(batch.job_id))
        assert job is not None
        skipped, behind = batch.done, 0
        async with aclosing(upload.groups(env, source)) as groups:
            async for lines in groups:
                start, behind = behind, behind + len(lines)
                specs = [
                    staging.validate(env, job, index - skipped, line.draft)
                    for index, line in enumerate(lines, start)
                    if index >= skipped
                ]
                if specs:
                    chunk = ingestion.chunk_of_specs(
                        batch, run, specs, cursor=str(behind), now=env.now()
                    )
                    yield chunk
                    batch = msgspec.structs.replace(batch, **chunk.values)

    return mutated


def _find_no_stalled_batch(_: Any) -> Any:
    async def mutated(env: Context, *, idle_s: float) -> list[Batch]:
        return []

    return mutated


def _abandon_batch_only(_: Any) -> Any:
    async def mutated(env: Context, batch: Batch, detail: str) -> None:
        await env.commit(ingestion.abandon(batch, now=env.now()))

    return mutated


MUTANTS = (
    Mutant(
        name="ingest_overwrites",
        window=14,
        invariants=(9, 14, 21),
        what="A chunk that is written again replaces existing rows.",
        apply=combine(
            swap("conveyor.engines.memory.store:MemoryStore.put_chunk", _overwrite_in_memory),
            swap("conveyor.engines.sqlite.store:_put_chunk", _overwrite_rows),
            swap("conveyor.engines.aws.dynamodb.table:Table.insert", _overwrite_items),
        ),
    ),
    Mutant(
        name="ingest_unfenced",
        window=15,
        invariants=(11, 21, 22),
        what="A step of an ingest is not fenced by the batch's owner and checkpoint.",
        apply=swap("conveyor.domain.changes:Chunk.fence", _remove_fence),
    ),
    Mutant(
        name="total_set_not_added",
        window=17,
        invariants=(11, 22, 23),
        what="Sealing a list sets the run's total to its own count and drops that of other lists.",
        apply=swap("conveyor.domain.run.ingestion:seal", _set_total),
    ),
    Mutant(
        name="upload_not_pinned",
        window=10,
        invariants=(10,),
        what="A job reads the uploaded list from the slot, where its caller may still replace it.",
        apply=swap("conveyor.usecases.submit.upload:take", _read_from_slot),
        world={
            "client_profile": "uploading",
            "sync_tasks_max": 5,
            "rates": {"list_overwritten": 1.0},
        },
    ),
    Mutant(
        name="bad_lines_vanish",
        window=13,
        invariants=(2, 12),
        what="An invalid line is left out instead of becoming a failed task.",
        apply=swap("conveyor.domain.run.ingestion:chunk_of_specs", _drop_invalid_lines),
        world={"at_once_max": 0, "client_speed": 10.0},
    ),
    Mutant(
        name="ingest_through_shut_gates",
        window=24,
        invariants=(24,),
        what="Chunks are still written to a run that has been stopped.",
        apply=swap("conveyor.domain.run.ingestion:_chunk", _pass_any_gate),
    ),
    Mutant(
        name="ids_without_batch",
        window=26,
        invariants=(2, 8),
        what="Lines of two lists at the same index have the same id.",
        apply=swap("conveyor.domain.submit.admission:task_ids", _omit_batch),
    ),
    Mutant(
        name="resumed_list_renumbered",
        window=19,
        invariants=(2, 8),
        what="An ingester that resumes a list numbers its lines from 0 again.",
        apply=swap("conveyor.usecases.run.ingest:_chunks_of_upload", _number_from_zero),
        world={
            "client_profile": "uploading",
            "sync_tasks_max": 5,
            "chunk_tasks": 1,
            "rates": {"killed_after": 0.005},
        },
    ),
    Mutant(
        name="stalled_lists_stay",
        window=8,
        invariants=(13,),
        what="No worker resumes a list whose ingester was lost.",
        apply=swap("conveyor.usecases.run.reconcile:stalled_batches", _find_no_stalled_batch),
    ),
    Mutant(
        name="failed_ingest_leaves_run",
        window=21,
        invariants=(13, 27),
        what="A list that cannot be ingested is abandoned, and its run waits for it.",
        apply=swap("conveyor.usecases.run.ingest:fail_batch", _abandon_batch_only),
        world={"client_profile": "uploading", "sync_tasks_max": 5, "limits": SHORT_LISTS},
    ),
)
