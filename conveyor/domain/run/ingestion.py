"""The only ingest path: chunk by chunk, inserts only, fenced by the epoch, sealed once
(SPEC.md 4.3)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from conveyor.domain import errors, event_log, lifecycle
from conveyor.domain.changes import BatchKey, Change, Chunk, Guard, Insert, RunKey, Update
from conveyor.domain.damage import DamagedTask, without_marks
from conveyor.domain.ids import RunId, event_id
from conveyor.domain.lifecycle import BATCH, RUN_LIVE, SETTLES_PASS, TASK_TERMINAL, BatchEvent
from conveyor.domain.model import (
    Batch,
    EventType,
    FailureReason,
    IngestStatus,
    RowsOf,
    Run,
    StagedList,
    Task,
    TaskSpec,
    TaskStatus,
    UploadedList,
)
from conveyor.domain.submit.admission import Identity, counts_of, make_ref, make_tasks
from conveyor.domain.submit.target import host_of

# A list that crashes its process would be taken up for ever. After this many failures without one
# chunk of progress, the ingest is given up.
ATTEMPTS_WITHOUT_PROGRESS_MAX = 5
STALLED_S = 25.0
"""After this time without progress, no process works on the batch, or its process is stuck."""


def batch_key(batch: Batch) -> BatchKey:
    return BatchKey(batch.job_id, batch.run_id, batch.batch_id)


def acquire_batch(batch: Batch, *, now: float) -> Change:
    """Takes the batch. The new epoch fences off the process that held it before.

    A failure is counted only if the batch was stalled. If it made progress a moment ago, another
    process was working on it, and the takeover, for example by a repeated request, is no failure of
    the list.
    """
    guard = Guard(
        status_in=lifecycle.sources(BATCH, BatchEvent.ACQUIRED), equals=(("epoch", batch.epoch),)
    )
    failures = {"failures": 1} if now - batch.updated_at >= STALLED_S else {}
    update = Update(batch_key(batch), guard, {"updated_at": now}, {"epoch": 1, **failures})
    return Change((update,))


def undo_failure_count(batch: Batch) -> Change:
    """Reverts the failure of `acquire_batch`: an outage stopped the ingest, not the list."""
    guard = Guard(equals=(("epoch", batch.epoch),), at_least=("failures", 1))
    return Change((Update(batch_key(batch), guard, {}, {"failures": -1}),))


def chunk_of_specs(
    batch: Batch,
    run: Run,
    specs: Sequence[TaskSpec],
    identities: Sequence[Identity] | None = None,
    *,
    cursor: str,
    now: float,
) -> Chunk:
    """Returns the chunk that admits these lines of a staged or uploaded list."""
    assert isinstance(batch.source, (StagedList, UploadedList))
    origin = (batch.source.origin_run_id, batch.source.origin_batch_id)
    tasks = make_tasks(specs, origin, run, now, identities)
    return _chunk(batch, run, tasks, cursor=cursor, sources=frozenset(), now=now)


def chunk_of_rows(batch: Batch, run: Run, rows: Sequence[Task], *, now: float) -> Chunk:
    """Returns the chunk that replays these rows of an earlier run."""
    assert isinstance(batch.source, RowsOf)
    assert rows
    tasks = [replay(row, run, batch.source, now) for row in rows]
    sources = frozenset(task.source_run_id for task in tasks if task.source_run_id)
    return _chunk(batch, run, tasks, cursor=rows[-1].task_id, sources=sources, now=now)


def matches_filter(row: Task, source: RowsOf) -> bool:
    """Whether the filter of a rerun selects this row. An unfinished task counts as pending."""
    status = row.status if row.status in TASK_TERMINAL else TaskStatus.PENDING
    if status not in source.retry:
        return False
    if source.reasons is not None and _reason_of(row) not in source.reasons:
        return False
    return source.hosts is None or host_of(row.url) in source.hosts


def _reason_of(row: Task) -> FailureReason | None:
    """The reason under which the counters have the row (`admission.counts_of`)."""
    failed = row.status is TaskStatus.FAILED
    return row.reason or FailureReason.BAD_TARGET if failed else None


def replay(row: Task, run: Run, source: RowsOf, now: float) -> Task:
    """Copies a row of an earlier run into a new run: it starts over, or is inherited with its
    result.

    An unfinished task starts over, whatever the filter says: an inherited one would keep the new
    run from ending. An invalid line fails again, because its row contains only the valid parts of
    it and must never be fetched.
    """
    if isinstance(row, DamagedTask):
        return _replay_damaged(row, run, source, now)
    is_refused = row.status is TaskStatus.FAILED and not row.claim
    if row.status in TASK_TERMINAL and not matches_filter(row, source):
        return msgspec.structs.replace(
            row,
            run_id=run.run_id,
            source_run_id=row.source_run_id or row.run_id,
            created_at=now,
            updated_at=now,
        )
    return Task(
        run_id=run.run_id,
        task_id=row.task_id,
        shard=row.shard,
        batch_id=row.batch_id,
        index=row.index,
        url=row.url,
        method=row.method,
        external_id=row.external_id,
        metadata=row.metadata,
        params=row.params,
        sealed=row.sealed,
        duplicate_of=row.duplicate_of,
        status=TaskStatus.FAILED if is_refused else TaskStatus.PENDING,
        problem=row.problem if is_refused else None,
        reason=row.reason if is_refused else None,
        created_at=now,
        updated_at=now,
    )


def _replay_damaged(row: DamagedTask, run: Run, source: RowsOf, now: float) -> Task:
    """Inherits the readable part of a damaged row. A task that would start over fails instead,
    because its URL or parameters may be lost."""
    if row.status not in TASK_TERMINAL or matches_filter(row, source):
        row = msgspec.structs.replace(
            row,
            status=TaskStatus.FAILED,
            problem=errors.row_damaged(row.damaged),
            reason=FailureReason.OTHER,
            result=None,
            claim=0,
        )
    return replay(without_marks(row), run, source, now)


def _chunk(
    batch: Batch,
    run: Run,
    tasks: Sequence[Task],
    *,
    cursor: str,
    sources: frozenset[RunId],
    now: float,
) -> Chunk:
    refs = tuple(make_ref(run, task) for task in tasks if task.status not in TASK_TERMINAL)
    return Chunk(
        key=batch_key(batch),
        epoch=batch.epoch,
        done_before=batch.done,
        tasks=tuple(tasks),
        refs=refs,
        stats=counts_of(tasks),
        values={
            "done": batch.done + len(tasks),
            "cursor": cursor,
            "failures": 0,
            "updated_at": now,
            "source_run_ids": tuple(sorted(sources | frozenset(batch.source_run_ids))),
        },
        gate_in=SETTLES_PASS,
    )


def seal(batch: Batch, run: Run, *, now: float) -> Change:
    """Adds the count of the batch to the total of the run, once: every line has a row and a ref."""
    inherited = frozenset(batch.source_run_ids) | frozenset(run.source_run_ids)
    run_values = {"updated_at": now, "source_run_ids": tuple(sorted(inherited))}
    events: list[Insert] = []
    if run.ingest_status is not None:
        run_values["ingest_status"] = IngestStatus.DONE
        identity = event_id(f"{run.run_id}:{batch.batch_id}", EventType.INGEST_DONE)
        events = [
            event_log.of_run(
                run, EventType.INGEST_DONE, now=now, identity=identity, tasks=batch.done
            )
        ]
    return Change(
        (
            Update(
                batch_key(batch),
                Guard(
                    status_in=lifecycle.sources(BATCH, BatchEvent.SEALED),
                    equals=(("epoch", batch.epoch), ("done", batch.done)),
                ),
                {
                    "status": lifecycle.target(BATCH, BatchEvent.SEALED),
                    "total": batch.done,
                    "updated_at": now,
                },
            ),
            Update(
                RunKey(run.job_id, run.run_id),
                Guard(status_in=RUN_LIVE),
                run_values,
                {
                    "total": batch.done,
                    "open_batches": -1,
                    "planned": batch.done - batch.total,
                },
            ),
            *events,
        )
    )


def abandon(batch: Batch, *, now: float) -> Change:
    """Ends a batch whose run ended before the whole list was ingested."""
    update = Update(
        batch_key(batch),
        Guard(status_in=lifecycle.sources(BATCH, BatchEvent.ABANDONED)),
        {"status": lifecycle.target(BATCH, BatchEvent.ABANDONED), "updated_at": now},
    )
    return Change((update,))


def failed_too_often(batch: Batch) -> bool:
    """Whether the batch failed too often without one chunk of progress."""
    return batch.failures >= ATTEMPTS_WITHOUT_PROGRESS_MAX
