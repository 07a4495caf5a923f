"""Chunks are fenced, replayed tasks start over or inherit results, and a batch is sealed once."""

from __future__ import annotations

from typing import Any

import pytest

from conveyor.domain import lifecycle
from conveyor.domain.changes import RunKey, Update
from conveyor.domain.ids import FIRST_BATCH, RunId, TaskId
from conveyor.domain.model import (
    Attempt,
    Batch,
    BatchStatus,
    CounterState,
    FailureReason,
    IngestStatus,
    Result,
    RowsOf,
    StagedList,
    Task,
    TaskSpec,
    TaskStatus,
)
from conveyor.domain.run import ingestion
from tests.builders import OTHER_RUN, RUN, T0, a_batch, a_run, a_task, a_ulid, key_of

STAGED = StagedList(key="k", origin_run_id=RUN, origin_batch_id=FIRST_BATCH)
FAILED_ONLY = frozenset({TaskStatus.FAILED})
EVERYTHING = frozenset(TaskStatus)
ONLY_FAILED = RowsOf(run_id=RUN, retry=FAILED_ONLY)
RESULT = Result("jobs/j/runs/r/t/1", 10, "00", "text/html", 200)
LINES = [TaskSpec(index=index, url="https://example.com/") for index in range(3)]


def a_replay(retry: frozenset[TaskStatus] = FAILED_ONLY, **fields: Any) -> Batch:
    return a_batch(OTHER_RUN, source=RowsOf(run_id=RUN, retry=retry), **fields)


def a_finished(index: int, status: TaskStatus, **fields: Any) -> Task:
    attempt = Attempt(number=1, started_at=T0, ended_at=T0 + 1)
    return a_task(
        index, status=status, claim=1, attempts=1, started_at=T0, history=(attempt,), **fields
    )


def test_acquiring_a_batch_fences_off_its_previous_owner() -> None:
    stalled_at = T0 + ingestion.STALLED_S
    (update,) = ingestion.acquire_batch(a_batch(epoch=3), now=stalled_at).writes

    assert isinstance(update, Update)
    assert update.guard.equals == (("epoch", 3),)
    assert update.guard.status_in == frozenset({BatchStatus.OPEN})
    assert update.deltas == {"epoch": 1, "failures": 1}


def test_acquiring_a_batch_that_makes_progress_counts_no_failure() -> None:
    soon = T0 + ingestion.STALLED_S - 1
    (update,) = ingestion.acquire_batch(a_batch(epoch=3), now=soon).writes

    assert isinstance(update, Update)
    assert update.deltas == {"epoch": 1}


def test_a_chunk_is_fenced_by_epoch_position_and_counter_state() -> None:
    batch = a_batch(source=STAGED, epoch=2, done=40, failures=3)

    chunk = ingestion.chunk_of_specs(batch, a_run(), LINES, cursor="912", now=T0)

    assert chunk.key == key_of(batch)
    assert (chunk.epoch, chunk.done_before) == (2, 40)
    assert chunk.gate_in == {CounterState.OPEN}


def test_a_chunk_advances_the_checkpoint_by_the_lines_it_admits() -> None:
    batch = a_batch(source=STAGED, done=40, failures=3)

    chunk = ingestion.chunk_of_specs(batch, a_run(), LINES, cursor="912", now=T0 + 5)

    assert chunk.values["done"] == 43
    assert chunk.values["cursor"] == "912"
    assert chunk.values["updated_at"] == T0 + 5
    assert sum(count["admitted"] for count in chunk.stats.values()) == 3


def test_a_chunk_resets_the_failure_count_of_its_batch() -> None:
    batch = a_batch(source=STAGED, failures=4)

    chunk = ingestion.chunk_of_specs(batch, a_run(), LINES, cursor="1", now=T0)

    assert chunk.values["failures"] == 0


def test_a_chunk_enqueues_every_task_that_must_run() -> None:
    chunk = ingestion.chunk_of_specs(a_batch(source=STAGED), a_run(), LINES, cursor="1", now=T0)

    assert [ref.task_id for ref in chunk.refs] == [task.task_id for task in chunk.tasks]
    assert len(chunk.tasks) == 3


def test_a_task_that_the_rerun_filter_selects_starts_over() -> None:
    row = a_finished(0, TaskStatus.FAILED, reason=FailureReason.BLOCKED, external_id="x")

    again = ingestion.replay(row, a_run(OTHER_RUN), ONLY_FAILED, T0 + 9)

    assert (again.run_id, again.task_id, again.shard) == (OTHER_RUN, row.task_id, row.shard)
    assert (again.index, again.url, again.external_id) == (row.index, row.url, "x")
    assert again.status is TaskStatus.PENDING
    assert (again.claim, again.attempts, again.history, again.reason) == (0, 0, (), None)
    assert again.source_run_id is None


def test_a_task_that_the_rerun_filter_leaves_out_is_inherited_with_its_result() -> None:
    row = a_finished(0, TaskStatus.SUCCESSFUL, result=RESULT)

    inherited = ingestion.replay(row, a_run(OTHER_RUN), ONLY_FAILED, T0 + 9)

    assert inherited.run_id == OTHER_RUN
    assert inherited.status is TaskStatus.SUCCESSFUL
    assert inherited.result == RESULT
    assert inherited.history == row.history
    assert inherited.source_run_id == RUN


def test_a_result_inherited_twice_still_names_the_run_that_owns_it() -> None:
    owner = RunId(a_ulid(7))
    row = a_finished(0, TaskStatus.SUCCESSFUL, result=RESULT, source_run_id=owner)

    inherited = ingestion.replay(row, a_run(OTHER_RUN), ONLY_FAILED, T0)

    assert inherited.source_run_id == owner


@pytest.mark.parametrize("status", sorted(lifecycle.TASK_UNFINISHED))
def test_an_unfinished_task_starts_over_whatever_the_rerun_filter_selects(
    status: TaskStatus,
) -> None:
    row = a_task(0, status=status, claim=3, attempts=1)

    again = ingestion.replay(row, a_run(OTHER_RUN), ONLY_FAILED, T0)

    assert (again.status, again.claim, again.attempts) == (TaskStatus.PENDING, 0, 0)


def test_a_replayed_chunk_counts_inherited_results_and_enqueues_only_the_other_tasks() -> None:
    rows = [a_finished(0, TaskStatus.SUCCESSFUL, result=RESULT), a_finished(1, TaskStatus.FAILED)]

    chunk = ingestion.chunk_of_rows(a_replay(), a_run(OTHER_RUN), rows, now=T0)

    assert chunk.stats == {0: {"admitted": 2, "done": 1, "successful": 1}}
    assert [ref.task_id for ref in chunk.refs] == [rows[1].task_id]
    assert chunk.values["cursor"] == rows[-1].task_id
    assert chunk.values["source_run_ids"] == (RUN,)


def test_the_owners_of_inherited_results_accumulate_over_chunks() -> None:
    earlier = RunId(a_ulid(3))
    batch = a_replay(source_run_ids=(earlier,))
    rows = [a_finished(0, TaskStatus.SUCCESSFUL, result=RESULT)]

    chunk = ingestion.chunk_of_rows(batch, a_run(OTHER_RUN), rows, now=T0)

    assert chunk.values["source_run_ids"] == (earlier, RUN)


def test_a_replay_of_all_tasks_inherits_nothing() -> None:
    rows = [a_finished(0, TaskStatus.SUCCESSFUL, result=RESULT)]

    chunk = ingestion.chunk_of_rows(a_replay(EVERYTHING), a_run(OTHER_RUN), rows, now=T0)

    assert chunk.values["source_run_ids"] == ()
    assert chunk.stats == {0: {"admitted": 1}}


def test_a_seal_adds_the_counted_lines_to_the_total_once() -> None:
    run = a_run(planned=100, ingest_status=IngestStatus.PENDING)
    batch = a_batch(total=100, done=97, epoch=2)

    on_batch, on_run, _ = ingestion.seal(batch, run, now=T0).writes

    assert isinstance(on_batch, Update)
    assert isinstance(on_run, Update)
    assert on_batch.guard.status_in == frozenset({BatchStatus.OPEN})
    assert set(on_batch.guard.equals) == {("epoch", 2), ("done", 97)}
    assert on_batch.values["total"] == 97
    assert on_run.key == RunKey(run.job_id, run.run_id)
    assert on_run.guard.status_in == lifecycle.RUN_LIVE
    assert on_run.deltas == {"total": 97, "open_batches": -1, "planned": -3}
    assert on_run.values["ingest_status"] is IngestStatus.DONE


def test_the_seal_of_an_inline_list_sets_no_ingest_status() -> None:
    _, on_run = ingestion.seal(a_batch(), a_run(), now=T0).writes

    assert isinstance(on_run, Update)
    assert "ingest_status" not in on_run.values


def test_a_seal_gives_the_run_the_owners_of_inherited_results() -> None:
    earlier = RunId(a_ulid(3))

    _, on_run = ingestion.seal(
        a_batch(source_run_ids=(RUN,)), a_run(OTHER_RUN, source_run_ids=(earlier,)), now=T0
    ).writes

    assert isinstance(on_run, Update)
    assert on_run.values["source_run_ids"] == (earlier, RUN)


def test_only_an_open_batch_can_be_abandoned() -> None:
    (update,) = ingestion.abandon(a_batch(), now=T0).writes

    assert isinstance(update, Update)
    assert update.guard.status_in == frozenset({BatchStatus.OPEN})
    assert update.values["status"] is BatchStatus.ABANDONED


def test_a_batch_is_given_up_after_five_tries_without_progress() -> None:
    assert not ingestion.failed_too_often(a_batch(failures=4))
    assert ingestion.failed_too_often(a_batch(failures=5))


def test_tasks_of_a_staged_list_have_ids_made_from_the_list_s_origin() -> None:
    batch = a_batch(OTHER_RUN, source=STAGED)

    chunk = ingestion.chunk_of_specs(batch, a_run(OTHER_RUN), LINES, cursor="1", now=T0)

    assert [task.task_id for task in chunk.tasks] == [
        TaskId(a_task(index).task_id) for index in range(3)
    ]
    assert {task.run_id for task in chunk.tasks} == {OTHER_RUN}
