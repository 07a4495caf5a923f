"""Every pair of status and event, legal or not, and the status that is derived from the
counters."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import pytest

from conveyor.domain import lifecycle
from conveyor.domain.export_record import ExportStatus
from conveyor.domain.lifecycle import TaskEvent
from conveyor.domain.model import (
    BatchStatus,
    CounterState,
    JobStatus,
    NoticeStatus,
    RunStatus,
    TaskStatus,
    Totals,
)
from tests.builders import T0, a_run

# This is written by hand, so that a mistake in a table shows as a difference.
LEGAL: dict[str, tuple[type[StrEnum], lifecycle.Table[Any, Any], set[str]]] = {
    "job": (
        JobStatus,
        lifecycle.JOB,
        {"open closed closed", "open deleted deleted", "closed deleted deleted"},
    ),
    "run": (
        RunStatus,
        lifecycle.RUN,
        {
            "running drained pending",
            "pending fed running",
            "running completed completed",
            "pending completed completed",
            "running stopped stopped",
            "pending stopped stopped",
            "running failed failed",
            "pending failed failed",
            "running deleted deleted",
            "pending deleted deleted",
            "completed deleted deleted",
            "stopped deleted deleted",
            "failed deleted deleted",
        },
    ),
    "task": (
        TaskStatus,
        lifecycle.TASK,
        {
            "pending claimed processing",
            "processing claimed processing",
            "pending extended processing",
            "processing extended processing",
            "pending released pending",
            "processing released pending",
            "pending succeeded successful",
            "processing succeeded successful",
            "pending failed failed",
            "processing failed failed",
        },
    ),
    "export": (
        ExportStatus,
        lifecycle.EXPORT,
        {
            "pending taken_up running",
            "running taken_up running",
            "running extended running",
            "running deferred running",
            "running completed completed",
            "running built delivering",
            "delivering sending delivering",
            "delivering sent completed",
            "pending failed failed",
            "running failed failed",
            "delivering failed failed",
        },
    ),
    "batch": (
        BatchStatus,
        lifecycle.BATCH,
        {"open acquired open", "open sealed sealed", "open abandoned abandoned"},
    ),
    "gate": (
        CounterState,
        lifecycle.COUNTERS,
        {
            "open draining draining",
            "draining draining draining",
            "open closed closed",
            "draining closed closed",
        },
    ),
    "notice": (
        NoticeStatus,
        lifecycle.NOTICE,
        {
            "due claimed due",
            "due postponed due",
            "due retried due",
            "due delivered delivered",
            "due exhausted exhausted",
            "due dropped dropped",
            "due redelivered due",
            "delivered redelivered due",
            "exhausted redelivered due",
            "dropped redelivered due",
        },
    ),
}

PAIRS = [
    pytest.param(name, status, event, id=f"{name}-{status}-{event}")
    for name, (statuses, table, _) in LEGAL.items()
    for status in statuses
    for event in table
]


@pytest.mark.parametrize(("name", "status", "event"), PAIRS)
def test_every_pair_of_status_and_event_is_legal_or_refused_as_listed(
    name: str, status: StrEnum, event: str
) -> None:
    _, table, legal = LEGAL[name]
    ends = [row.split()[2] for row in legal if row.split()[:2] == [status.value, event]]

    if ends:
        assert [lifecycle.target(table, event)] == ends
        assert status in lifecycle.sources(table, event)
    else:
        assert status not in lifecycle.sources(table, event)


@pytest.mark.parametrize(
    ("events", "table"),
    [
        (lifecycle.JobEvent, lifecycle.JOB),
        (lifecycle.RunEvent, lifecycle.RUN),
        (lifecycle.TaskEvent, lifecycle.TASK),
        (lifecycle.BatchEvent, lifecycle.BATCH),
        (lifecycle.CounterEvent, lifecycle.COUNTERS),
        (lifecycle.NoticeEvent, lifecycle.NOTICE),
        (lifecycle.ScheduleEvent, lifecycle.SCHEDULE),
        (lifecycle.ExportEvent, lifecycle.EXPORT),
    ],
)
def test_every_event_of_a_machine_has_a_row(
    events: type[StrEnum], table: lifecycle.Table[Any, Any]
) -> None:
    assert set(table) == set(events)


def test_a_terminal_status_can_only_change_to_deleted() -> None:
    for table, terminal in (
        (lifecycle.RUN, lifecycle.RUN_TERMINAL),
        (lifecycle.TASK, lifecycle.TASK_TERMINAL),
    ):
        for event, (starts, _) in table.items():
            assert event == "deleted" or not starts & terminal


def test_the_sets_of_statuses_have_the_expected_members() -> None:
    assert set(RunStatus) == lifecycle.RUN_LIVE | lifecycle.RUN_TERMINAL
    assert not lifecycle.RUN_LIVE & lifecycle.RUN_TERMINAL
    assert {RunStatus.RUNNING, RunStatus.PENDING} == lifecycle.RUN_LIVE
    assert {TaskStatus.SUCCESSFUL, TaskStatus.FAILED} == lifecycle.TASK_TERMINAL
    assert {TaskStatus.PENDING, TaskStatus.PROCESSING} == lifecycle.TASK_UNFINISHED
    assert {CounterState.OPEN} == lifecycle.SETTLES_PASS
    assert {CounterState.OPEN, CounterState.DRAINING} == lifecycle.RELEASES_PASS
    assert JobStatus.DELETED not in lifecycle.JOB_VISIBLE
    assert RunStatus.DELETED not in lifecycle.RUN_VISIBLE


@pytest.mark.parametrize(
    ("fields", "accepts_settles", "accepts_lists", "is_stopping"),
    [
        pytest.param({}, True, True, False, id="open"),
        pytest.param({"last_batch_received": True}, True, False, False, id="closed"),
        pytest.param({"sequence": 2}, True, False, False, id="a rerun"),
        pytest.param({"stop_requested_at": T0}, False, False, True, id="stop requested"),
        pytest.param(
            {"stop_requested_at": T0, "status": RunStatus.STOPPED},
            False,
            False,
            False,
            id="stopped",
        ),
        pytest.param({"status": RunStatus.COMPLETED}, False, False, False, id="completed"),
    ],
)
def test_a_run_accepts_settles_and_lists_according_to_its_fields(
    fields: dict[str, Any], accepts_settles: bool, accepts_lists: bool, is_stopping: bool
) -> None:
    run = a_run(**fields)

    assert lifecycle.accepts_settles(run) is accepts_settles
    assert lifecycle.accepts_lists(run) is accepts_lists
    assert lifecycle.is_stopping(run) is is_stopping


def test_an_open_run_with_no_tasks_left_is_shown_as_pending() -> None:
    run = a_run(total=3)

    assert lifecycle.displayed_status(run, Totals(done=3)) is RunStatus.PENDING


@pytest.mark.parametrize(
    ("fields", "done"),
    [
        pytest.param({"total": 3}, 2, id="a task is left"),
        pytest.param({"total": 3, "open_batches": 1}, 3, id="a list is being ingested"),
        pytest.param({"total": 3, "last_batch_received": True}, 3, id="no more can come"),
    ],
)
def test_a_live_run_with_tasks_left_is_shown_as_running(fields: dict[str, Any], done: int) -> None:
    run = a_run(**fields)

    assert lifecycle.displayed_status(run, Totals(done=done)) is RunStatus.RUNNING


@pytest.mark.parametrize("status", sorted(lifecycle.RUN_TERMINAL))
def test_an_ended_run_is_shown_with_its_final_status(status: RunStatus) -> None:
    run = a_run(status=status, ended_at=T0)

    assert lifecycle.displayed_status(run, Totals()) is status


@pytest.mark.parametrize(
    ("is_last", "open_batches", "done", "expected"),
    [
        (True, 0, 5, True),
        (True, 0, 4, False),
        (True, 1, 5, False),
        (False, 0, 5, False),
    ],
)
def test_a_run_is_complete_when_all_tasks_are_admitted_and_done(
    is_last: bool, open_batches: int, done: int, expected: bool
) -> None:
    run = a_run(total=5, last_batch_received=is_last, open_batches=open_batches)

    assert lifecycle.is_complete(run, Totals(done=done)) is expected


def test_a_closed_run_without_tasks_is_complete() -> None:
    assert lifecycle.is_complete(a_run(last_batch_received=True), Totals())


def test_a_diagram_contains_every_transition_once() -> None:
    for _, table, legal in LEGAL.values():
        lines = lifecycle.mermaid(table).splitlines()

        drawn = {
            "{} {} {}".format(*(start.strip(), event.strip(), end.strip()))
            for line in lines[1:]
            for start, _, rest in [line.partition("-->")]
            for end, _, event in [rest.partition(":")]
        }
        assert lines[0] == "stateDiagram-v2"
        assert drawn == legal
        assert len(lines) == len(legal) + 1


@pytest.mark.parametrize("event", [TaskEvent.EXTENDED, TaskEvent.RELEASED, TaskEvent.SUCCEEDED])
def test_only_a_first_delivery_settles_or_releases_a_pending_task(event: TaskEvent) -> None:
    first = lifecycle.sources_under_claim(event, 0)
    later = lifecycle.sources_under_claim(event, 1)

    assert first == frozenset({TaskStatus.PENDING, TaskStatus.PROCESSING})
    assert later == frozenset({TaskStatus.PROCESSING})
