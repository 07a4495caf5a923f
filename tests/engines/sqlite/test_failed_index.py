"""Failed tasks have an index, so a page of them reads no other tasks."""

from __future__ import annotations

import sqlite3

import pytest

from conveyor.domain.model import TaskStatus
from conveyor.domain.queries import TasksOf
from conveyor.engines.sqlite.database import migrate
from conveyor.engines.sqlite.store import find
from tests.builders import JOB, RUN

INDEX = "tasks_with_problem"


@pytest.mark.parametrize(
    ("statuses", "is_used"),
    [
        (frozenset({TaskStatus.FAILED}), True),
        (frozenset({TaskStatus.FAILED, TaskStatus.SUCCESSFUL}), False),
        (frozenset({TaskStatus.SUCCESSFUL}), False),
        (None, False),
    ],
)
def test_only_a_page_of_failed_tasks_uses_their_index(
    statuses: frozenset[TaskStatus] | None, is_used: bool
) -> None:
    said: list[str] = []
    connection = sqlite3.connect(":memory:", isolation_level=None)
    migrate(connection)
    connection.set_trace_callback(said.append)

    find(
        connection,
        TasksOf(job_id=JOB, run_id=RUN, shard_count=1, statuses=statuses, limit=10),
        note_damage=lambda error: None,
    )

    (query,) = said
    connection.set_trace_callback(None)
    ((*_, plan),) = connection.execute(f"EXPLAIN QUERY PLAN {query}")
    connection.close()
    assert (INDEX in plan) is is_used
