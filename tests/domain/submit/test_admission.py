"""How a list is admitted to a run: synchronously or later, which rows, which counts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from conveyor.domain import errors, lifecycle, limits
from conveyor.domain.budget import Budget, BudgetCap, Unit
from conveyor.domain.changes import (
    Change,
    Enqueue,
    Insert,
    JobKey,
    OpenQueue,
    Row,
    RunKey,
    StatsKey,
    Update,
    Write,
)
from conveyor.domain.ids import FIRST_BATCH, BatchId, shard_of, task_id
from conveyor.domain.model import (
    BatchStatus,
    CounterState,
    Event,
    FailureReason,
    JobStatus,
    Run,
    ShardCounters,
    StagedList,
    Task,
    TaskSpec,
    TaskStatus,
)
from conveyor.domain.submit import admission
from conveyor.domain.submit.admission import AdmissionMode, choose_path
from tests.builders import OTHER_RUN, RUN, T0, a_job, a_run

ORIGIN = (RUN, FIRST_BATCH)
BAD_LINE = errors.make_problem("malformed_url", "The line is not a valid task", 400)


def specs(*problems_of_lines: bool) -> list[TaskSpec]:
    return [
        TaskSpec(index=index, url="https://example.com/", problem=BAD_LINE if is_bad else None)
        for index, is_bad in enumerate(problems_of_lines)
    ]


def tasks_of(run: Run, lines: Sequence[TaskSpec]) -> list[Task]:
    return admission.make_tasks(lines, ORIGIN, run, T0)


def inserts_of(change: Change, kind: type[Row]) -> list[Row]:
    rows = [write.row for write in change.writes if isinstance(write, Insert)]
    return [row for row in rows if isinstance(row, kind)]


def update_of(writes: Sequence[Write], key: object) -> Update:
    (update,) = (write for write in writes if isinstance(write, Update) and write.key == key)
    return update


@pytest.mark.parametrize(
    ("tasks_count", "path"),
    [
        (0, AdmissionMode.AT_ONCE),
        (limits.INLINE_TASKS_MAX, AdmissionMode.AT_ONCE),
        (limits.INLINE_TASKS_MAX + 1, AdmissionMode.INLINE),
        (limits.SYNC_TASKS_MAX - 1, AdmissionMode.INLINE),
        (limits.SYNC_TASKS_MAX, AdmissionMode.LATER),
        (limits.TASKS_MAX, AdmissionMode.LATER),
    ],
)
def test_the_size_of_a_list_decides_its_path(tasks_count: int, path: AdmissionMode) -> None:
    assert (
        choose_path(
            tasks_count, at_once_max=limits.INLINE_TASKS_MAX, sync_max=limits.SYNC_TASKS_MAX
        )
        is path
    )


def test_a_list_of_the_synchronous_maximum_or_more_is_admitted_later() -> None:
    assert choose_path(5, at_once_max=90, sync_max=5) is AdmissionMode.LATER
    assert choose_path(4, at_once_max=90, sync_max=5) is AdmissionMode.AT_ONCE


@given(st.integers(0, 10**6), st.sampled_from(["0", "7", "01ARZ3NDEKTSV4RRFFQ69G5FAV"]))
def test_a_line_always_gets_the_same_id_and_shard(index: int, batch: str) -> None:
    run = a_run(shard_count=8)
    spec = TaskSpec(index=index, url="https://example.com/")
    origin = (RUN, BatchId(batch))

    (first,) = admission.make_tasks([spec], origin, run, T0)
    (again,) = admission.make_tasks([spec], origin, run, T0 + 1000)

    assert first.task_id == again.task_id == task_id(RUN, BatchId(batch), index)
    assert first.shard == again.shard == shard_of(first.task_id, 8)


def test_task_ids_are_made_from_the_origin_of_a_list_not_from_its_run() -> None:
    spec = TaskSpec(index=3, url="https://example.com/")

    (task,) = admission.make_tasks([spec], ORIGIN, a_run(OTHER_RUN), T0)

    assert task.run_id == OTHER_RUN
    assert task.task_id == task_id(RUN, FIRST_BATCH, 3)


def test_tasks_of_two_batches_with_equal_indexes_have_different_ids() -> None:
    assert task_id(RUN, BatchId("0"), 0) != task_id(RUN, BatchId("1"), 0)


def test_an_invalid_line_is_a_task_that_has_failed_already() -> None:
    (task,) = tasks_of(a_run(), specs(True))

    assert task.status is TaskStatus.FAILED
    assert task.reason is FailureReason.BAD_TARGET
    assert task.problem == BAD_LINE


def test_shard_counts_contain_what_each_shard_gains() -> None:
    run = a_run(shard_count=4)
    tasks = tasks_of(run, specs(*[False] * 30, *[True] * 10))

    counts = admission.counts_of(tasks)

    assert sum(count["admitted"] for count in counts.values()) == 40
    assert sum(count.get("done", 0) for count in counts.values()) == 10
    assert sum(count.get("failed", 0) for count in counts.values()) == 10
    assert sum(count.get("bad_target", 0) for count in counts.values()) == 10
    for shard, count in counts.items():
        assert count["admitted"] == sum(task.shard == shard for task in tasks)


def test_an_inherited_success_counts_as_done_and_successful() -> None:
    (task,) = tasks_of(a_run(), specs(False))

    from_before = admission.counts_of([replace(task, status=TaskStatus.SUCCESSFUL)])

    assert from_before == {0: {"admitted": 1, "done": 1, "successful": 1}}


def test_a_new_job_is_one_change_with_run_counters_batch_and_tasks() -> None:
    run = a_run(shard_count=3)
    tasks = tasks_of(run, specs(False, True, False))
    batch = admission.make_batch(run, FIRST_BATCH, None, total=3, now=T0)

    change = admission.new_job(a_job(), run, batch, tasks)

    assert all(isinstance(write, Insert) for write in change.writes)
    stats = [row for row in inserts_of(change, ShardCounters) if isinstance(row, ShardCounters)]
    assert [row.shard for row in stats] == [0, 1, 2]
    assert all(row.status is CounterState.OPEN for row in stats)
    assert sum(row.admitted for row in stats) == 3
    assert sum(row.done for row in stats) == 1
    assert inserts_of(change, Task) == tasks
    assert len(inserts_of(change, Event)) == 2
    assert len(change.writes) == 1 + 1 + 3 + 1 + 3 + 2


def test_a_new_job_with_a_budget_inserts_the_budget_of_its_run() -> None:
    plain, paid = a_run(), a_run(budget=BudgetCap(Unit.CREDITS, 40))

    (budget,) = inserts_of(admission.new_job(a_job(), paid, None, []), Budget)

    assert budget == Budget(paid.job_id, paid.run_id, Unit.CREDITS, cap=40, left=40)
    assert inserts_of(admission.new_job(a_job(), plain, None, []), Budget) == []


def test_only_tasks_that_must_run_are_enqueued() -> None:
    run = a_run()
    tasks = tasks_of(run, specs(False, True, False))

    opened, effect = admission.new_job(a_job(), run, None, tasks).effects

    assert opened == OpenQueue(run.run_id)
    assert isinstance(effect, Enqueue)
    assert [ref.task_id for ref in effect.refs] == [tasks[0].task_id, tasks[2].task_id]
    assert admission.new_job(a_job(), run, None, tasks[1:2]).effects == (opened,)


def test_a_list_with_a_source_stays_open_until_it_is_ingested() -> None:
    source = StagedList(key="k", origin_run_id=RUN, origin_batch_id=FIRST_BATCH)

    staged = admission.make_batch(a_run(), FIRST_BATCH, source, total=7, now=T0)
    at_once = admission.make_batch(a_run(), FIRST_BATCH, None, total=7, now=T0)

    assert (staged.status, staged.done) == (BatchStatus.OPEN, 0)
    assert (at_once.status, at_once.done) == (BatchStatus.SEALED, 7)


def test_another_run_needs_a_job_without_an_active_run() -> None:
    job, run = a_job(runs_count=1), a_run(OTHER_RUN, sequence=2)

    change = admission.new_run(job, run, [], [])

    update = update_of(change.writes, JobKey(job.job_id))
    assert update.guard.equals == (("active_run_id", None), ("runs_count", 1))
    assert update.guard.status_in == frozenset({job.status})
    assert update.values["active_run_id"] == update.values["latest_run_id"] == OTHER_RUN
    assert update.values["status"] is JobStatus.CLOSED
    assert update.deltas == {"runs_count": 1}


def test_adding_a_list_needs_an_open_job_and_a_live_run() -> None:
    job, run = a_job(), a_run()
    tasks = tasks_of(run, specs(False))
    batch = admission.make_batch(run, BatchId("1"), None, total=1, now=T0)

    change = admission.add_batch(job, run, batch, tasks, is_last=False, now=T0)

    on_job = update_of(change.writes, JobKey(job.job_id))
    on_run = update_of(change.writes, RunKey(run.job_id, run.run_id))
    assert on_job.guard.status_in == frozenset({JobStatus.OPEN})
    assert "status" not in on_job.values
    assert on_run.guard.status_in == lifecycle.RUN_LIVE
    assert set(on_run.guard.equals) == {("last_batch_received", False), ("stop_requested_at", None)}
    assert on_run.deltas == {"planned": 1, "batches_seq": 1, "total": 1}


def test_the_last_list_closes_the_job_in_the_change_that_admits_it() -> None:
    job, run = a_job(), a_run()
    batch = admission.make_batch(run, BatchId("1"), None, total=0, now=T0)

    change = admission.add_batch(job, run, batch, [], is_last=True, now=T0)

    assert update_of(change.writes, JobKey(job.job_id)).values["status"] is JobStatus.CLOSED
    on_run = update_of(change.writes, RunKey(run.job_id, run.run_id))
    assert on_run.values["last_batch_received"] is True


def test_a_staged_list_adds_to_the_total_only_when_it_is_sealed() -> None:
    run = a_run()
    source = StagedList(key="k", origin_run_id=RUN, origin_batch_id=BatchId("1"))
    batch = admission.make_batch(run, BatchId("1"), source, total=500, now=T0)

    change = admission.add_batch(a_job(), run, batch, [], is_last=False, now=T0)

    on_run = update_of(change.writes, RunKey(run.job_id, run.run_id))
    assert on_run.deltas == {"planned": 500, "batches_seq": 1, "open_batches": 1}


def test_a_list_is_admitted_only_while_the_counters_are_open() -> None:
    run = a_run()
    tasks = tasks_of(run, specs(False))
    batch = admission.make_batch(run, BatchId("1"), None, total=1, now=T0)

    change = admission.add_batch(a_job(), run, batch, tasks, is_last=False, now=T0)

    gate = update_of(change.writes, StatsKey(run.job_id, run.run_id, 0))
    assert gate.guard.status_in == frozenset({CounterState.OPEN})
    assert gate.deltas == {"admitted": 1}
