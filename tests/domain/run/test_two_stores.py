"""Two stores: which store has a row, and how a change that touches both is split."""

from __future__ import annotations

import msgspec
import pytest

from conveyor.domain.changes import ANY, Change, Delete, Insert, RecordKey, TaskKey, Update
from conveyor.domain.ids import EventId, RunId
from conveyor.domain.model import CounterState, PauseState, RunFailure, RunStatus, Task, Totals
from conveyor.domain.run import ingestion, settlement, termination, two_stores
from conveyor.domain.run.settlement import Cost
from conveyor.domain.run.two_stores import Place
from conveyor.domain.submit import admission
from tests.builders import (
    JOB,
    RUN,
    T0,
    a_batch,
    a_change,
    a_job,
    a_record,
    a_ref,
    a_run,
    a_stats,
    a_task,
    add,
    an_event,
    delete,
    insert,
    update,
)

JOB_ROW, RUN_ROW = a_job(active_run_id=RUN, latest_run_id=RUN), a_run()
TASK = a_task(metadata={"a": "b"}, params={"js_render": "true"})
CROSSINGS: dict[str, Change] = {
    "a new job": admission.new_job(JOB_ROW, RUN_ROW, a_batch(), [TASK]),
    "a new run": admission.new_run(JOB_ROW, RUN_ROW, [a_batch()], [TASK]),
    "a last list": admission.add_batch(JOB_ROW, RUN_ROW, a_batch(), [TASK], is_last=True, now=T0),
    "a stop": termination.request_stop(RUN_ROW, reason=None, now=T0),
    "a failure": termination.request_failure(
        RUN_ROW, RunFailure.SUBSCRIPTION_INACTIVE, "no plan", now=T0
    ),
    "an end": termination.complete(JOB_ROW, RUN_ROW, Totals(), now=T0),
    "a pause": termination.set_pause(RUN_ROW, PauseState.PAUSED, EventId("pause"), now=T0),
    "a deleted run": termination.delete_run(
        JOB_ROW, RUN_ROW, next_latest=None, intent_id="intent", now=T0
    ),
    "a deleted job": termination.delete_job(JOB_ROW, RUN_ROW, intent_id="intent", now=T0),
    "a closed job": termination.close(JOB_ROW, RUN_ROW, now=T0),
}
IN_ONE_STORE: dict[str, tuple[Change, Place]] = {
    "a claim": (settlement.claim(a_ref(), now=T0), Place.TASKS),
    "a release": (
        settlement.release_claim(a_ref(), a_task(claim=1), spent=Cost(), now=T0),
        Place.TASKS,
    ),
    "a taken batch": (ingestion.acquire_batch(a_batch(), now=T0), Place.RECORDS),
    "a sealed batch": (ingestion.seal(a_batch(), RUN_ROW, now=T0), Place.RECORDS),
    "a closed queue": (termination.note_queue_closed(RUN_ROW), Place.RECORDS),
}


@pytest.mark.parametrize("change", CROSSINGS.values(), ids=CROSSINGS)
def test_the_second_part_survives_encoding(change: Change) -> None:
    parts = two_stores.split(change, token="token", now=T0)

    *restored, mark = two_stores.completion(parts.crossing).writes

    undecided = [
        msgspec.structs.replace(write, guard=ANY) if isinstance(write, Update) else write
        for write in parts.second
    ]
    assert restored == undecided
    assert [type(value) for value in _values_of(restored)] == [
        type(value) for value in _values_of(undecided)
    ]
    assert mark.key == RecordKey("crossing/token")


def _values_of(writes: object) -> list[object]:
    assert isinstance(writes, list)
    return [v for write in writes if isinstance(write, Update) for v in write.values.values()]


@pytest.mark.parametrize("change", CROSSINGS.values(), ids=CROSSINGS)
def test_the_first_part_has_no_task_rows_and_stores_the_second_as_a_crossing(
    change: Change,
) -> None:
    parts = two_stores.split(change, token="token", now=T0)

    *first, crossing = parts.first.writes

    assert isinstance(crossing, Insert)
    assert crossing.row == parts.crossing
    assert parts.crossing.job_id == JOB
    assert not any(two_stores.is_in_task_store(write.key) for write in parts.first.writes)
    assert sorted(map(str, [*first, *parts.second])) == sorted(map(str, change.writes))


@pytest.mark.parametrize(("change", "place"), IN_ONE_STORE.values(), ids=IN_ONE_STORE)
def test_the_frequent_changes_of_workers_touch_one_store_only(change: Change, place: Place) -> None:
    assert two_stores.place_of(change) is place


def test_each_kind_of_write_survives_encoding() -> None:
    record, other = a_record(), a_task(1)
    change = a_change(
        insert(record), delete(TASK), add(a_stats(), done=1), update(other, claim=2), delete(record)
    )

    parts = two_stores.split(a_change(*change.writes[:4]), token="token", now=T0)

    removal, count, claim, _ = two_stores.completion(parts.crossing).writes
    assert isinstance(removal, Delete)
    assert isinstance(count, Update)
    assert count.deltas == {"done": 1}
    assert isinstance(claim, Update)
    assert claim.values == {"claim": 2}


def test_a_row_that_exists_already_is_left_out_of_the_second_part() -> None:
    event = an_event(job_id=JOB)
    parts = two_stores.split(a_change(insert(JOB_ROW), insert(event)), token="t", now=T0)
    change = two_stores.completion(parts.crossing)

    rest = two_stores.without(change, insert(event).key)

    assert [write.key for write in rest.writes] == [RecordKey("crossing/t")]


def test_reads_of_a_run_that_accepts_no_settles_rely_on_the_second_part() -> None:
    assert two_stores.relies_on_second(a_run(stop_requested_at=T0))
    assert two_stores.relies_on_second(a_run(status=RunStatus.COMPLETED))
    assert not two_stores.relies_on_second(a_run())
    assert not two_stores.relies_on_second(a_job())


def test_each_task_is_counted_in_the_change_that_inserts_it() -> None:
    rows: list[Task] = [a_task(n, RunId(RUN)) for n in range(3)]
    batch = a_batch(source=None)
    chunk = ingestion._chunk(batch, RUN_ROW, rows, cursor="", sources=frozenset(), now=T0)

    changes = two_stores.task_inserts(chunk)

    assert [len(change.writes) for change in changes] == [2, 2, 2]
    for change, task in zip(changes, rows, strict=True):
        placed, count = change.writes
        assert placed == Insert(TaskKey(JOB, RUN, task.task_id, task.shard), task)
        assert isinstance(count, Update)
        assert count.deltas == {"admitted": 1}
        assert count.guard.status_in == frozenset({CounterState.OPEN})
