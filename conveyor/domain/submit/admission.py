"""Admitting lists: the path one takes, and the change that makes it part of a run (SPEC.md 4.1).

Whatever is admitted is durable before anybody is told: in the first transaction when it is small,
else as a staged list that an open batch points at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import Enum

import msgspec

from conveyor.domain import event_log, lifecycle
from conveyor.domain.backpressure.reservation import open_budget
from conveyor.domain.changes import (
    BatchKey,
    Change,
    Enqueue,
    Guard,
    Insert,
    JobKey,
    RunKey,
    StatsKey,
    TaskKey,
    Update,
    Write,
)
from conveyor.domain.event import EventType
from conveyor.domain.ids import BatchId, RunId, task_ids
from conveyor.domain.lifecycle import JOB, JOB_VISIBLE, RUN_LIVE, SETTLES_PASS, TASK_TERMINAL
from conveyor.domain.model import (
    Batch,
    BatchStatus,
    CounterState,
    FailureReason,
    Job,
    Run,
    ShardCounters,
    Source,
    Task,
    TaskRef,
    TaskSpec,
    TaskStatus,
)
from conveyor.domain.run.counters import shards_of


class AdmissionMode(Enum):
    """How a list gets into its run."""

    AT_ONCE = "in the first transaction"
    INLINE = "staged, and ingested before the answer"
    LATER = "staged, and ingested after the answer"


def choose_path(tasks_count: int, *, at_once_max: int, sync_max: int) -> AdmissionMode:
    if tasks_count >= sync_max:
        return AdmissionMode.LATER
    return AdmissionMode.AT_ONCE if tasks_count <= at_once_max else AdmissionMode.INLINE


def make_tasks(
    specs: Sequence[TaskSpec], origin: tuple[RunId, BatchId], run: Run, now: float
) -> list[Task]:
    """The rows of these lines. An invalid line is a task that has failed already."""
    identities = task_ids(*origin, [spec.index for spec in specs])
    shards = shards_of(identities, run.shard_count)
    return [
        Task(
            run_id=run.run_id,
            task_id=identity,
            shard=shard,
            batch_id=origin[1],
            index=spec.index,
            url=spec.url,
            method=spec.method,
            external_id=spec.external_id,
            metadata=spec.metadata,
            params=spec.params,
            sealed=spec.sealed,
            status=TaskStatus.FAILED if spec.problem else TaskStatus.PENDING,
            problem=spec.problem,
            reason=FailureReason.BAD_TARGET if spec.problem else None,
            created_at=now,
            updated_at=now,
        )
        for spec, identity, shard in zip(specs, identities, shards, strict=True)
    ]


def make_ref(run: Run, task: Task) -> TaskRef:
    return TaskRef(run.job_id, run.run_id, task.task_id, task.shard)


def make_batch(
    run: Run, batch_id: BatchId, source: Source | None, *, total: int, now: float
) -> Batch:
    """The record of a list: sealed when it goes in at once, else open until it is ingested."""
    return Batch(
        job_id=run.job_id,
        run_id=run.run_id,
        batch_id=batch_id,
        status=BatchStatus.OPEN if source else BatchStatus.SEALED,
        source=source,
        total=total,
        done=0 if source else total,
        created_at=now,
        updated_at=now,
    )


def counts_of(tasks: Sequence[Task]) -> dict[int, dict[str, int]]:
    """What these new rows add to each shard's counters."""
    admitted = Counter(task.shard for task in tasks)
    counts = {shard: Counter(admitted=count) for shard, count in admitted.items()}
    for task in tasks:
        if task.status in TASK_TERMINAL:
            counts[task.shard].update(("done", task.status.value))
        if task.status is TaskStatus.FAILED:
            counts[task.shard][(task.reason or FailureReason.BAD_TARGET).value] += 1
    return {shard: dict(count) for shard, count in counts.items()}


def new_job(job: Job, run: Run, batch: Batch | None, tasks: Sequence[Task]) -> Change:
    """A job with its first run, and its first list if it came with one."""
    batches = [batch] if batch is not None else []
    return Change(
        (
            Insert(JobKey(job.job_id), job),
            *_run_writes(run, batches, tasks),
            event_log.of_job(job, EventType.JOB_CREATED, now=job.created_at),
            _run_created(run),
        ),
        _effects(run, tasks),
    )


def new_run(job: Job, run: Run, batches: Sequence[Batch], tasks: Sequence[Task]) -> Change:
    """Another run of a job that has none under way; the job is closed by it."""
    guard = Guard(  # As it was read: only whoever closes the job tells of it.
        status_in=JOB_VISIBLE & {job.status},
        equals=(("active_run_id", None), ("runs_count", run.sequence - 1)),
    )
    values = {
        "status": lifecycle.target(JOB, "closed"),
        "active_run_id": run.run_id,
        "latest_run_id": run.run_id,
        "updated_at": run.created_at,
    }
    update = Update(JobKey(job.job_id), guard, values, {"runs_count": 1})
    told = [_run_created(run), *event_log.closed_event(job, now=run.created_at)]
    return Change((update, *_run_writes(run, batches, tasks), *told), _effects(run, tasks))


def _run_created(run: Run) -> Insert:
    return event_log.of_run(
        run, EventType.RUN_CREATED, now=run.created_at, total=run.planned, rerun_of=run.rerun_of
    )


def add_batch(
    job: Job, run: Run, batch: Batch, tasks: Sequence[Task], *, is_last: bool, now: float
) -> Change:
    """One more list for an open job. Excludes a close, and a second go of itself."""
    job_values: dict[str, object] = {"updated_at": now}
    run_values: dict[str, object] = {"updated_at": now}
    if is_last:
        job_values |= {"status": lifecycle.target(JOB, "closed")}
        run_values |= {"last_batch_received": True}
    still_open = batch.status in lifecycle.sources(lifecycle.BATCH, "sealed")
    deltas = {"planned": batch.total, "batches_seq": 1}
    deltas |= {"open_batches": 1} if still_open else {"total": batch.total}
    takes_more = Guard(
        status_in=RUN_LIVE,
        equals=(("last_batch_received", False), ("stop_requested_at", None)),
    )
    writes: list[Write] = [
        Update(JobKey(job.job_id), Guard(status_in=lifecycle.sources(JOB, "closed")), job_values),
        Update(RunKey(run.job_id, run.run_id), takes_more, run_values, deltas),
        _batch_insert(batch),
        *_task_inserts(run, tasks),
    ]
    writes += [
        Update(StatsKey(run.job_id, run.run_id, shard), Guard(status_in=SETTLES_PASS), {}, counts)
        for shard, counts in counts_of(tasks).items()
    ]
    if is_last:
        writes += event_log.closed_event(job, now=now)
    return Change(tuple(writes), _effects(run, tasks))


def _run_writes(run: Run, batches: Sequence[Batch], tasks: Sequence[Task]) -> list[Write]:
    counts = counts_of(tasks)
    writes: list[Write] = [Insert(RunKey(run.job_id, run.run_id), run), *open_budget(run)]
    for shard in range(run.shard_count):
        stats = ShardCounters(
            job_id=run.job_id, run_id=run.run_id, shard=shard, status=CounterState.OPEN
        )
        seeded = msgspec.structs.replace(stats, **counts.get(shard, {}))
        writes.append(Insert(StatsKey(run.job_id, run.run_id, shard), seeded))
    writes += [_batch_insert(batch) for batch in batches]
    return [*writes, *_task_inserts(run, tasks)]


def _batch_insert(batch: Batch) -> Insert:
    return Insert(BatchKey(batch.job_id, batch.run_id, batch.batch_id), batch)


def _task_inserts(run: Run, tasks: Sequence[Task]) -> list[Insert]:
    return [
        Insert(TaskKey(run.job_id, run.run_id, task.task_id, task.shard), task) for task in tasks
    ]


def _effects(run: Run, tasks: Sequence[Task]) -> tuple[Enqueue, ...]:
    refs = tuple(make_ref(run, task) for task in tasks if task.status not in TASK_TERMINAL)
    return (Enqueue(refs),) if refs else ()
