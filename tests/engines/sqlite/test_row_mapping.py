"""Every kind of row survives its way into SQLite and back, field by field."""

from __future__ import annotations

import sqlite3

import pytest

from conveyor.domain.ids import BatchId, RunId
from conveyor.domain.model import (
    Attempt,
    DeliveryAttempt,
    FailureReason,
    Format,
    IngestStatus,
    ListFormat,
    ListSpec,
    Method,
    PauseState,
    Problem,
    Result,
    RowsOf,
    RunFailure,
    SigningKey,
    StagedList,
    TaskStatus,
    UploadedList,
    Webhook,
)
from conveyor.domain.schedule.schedule import Calendar, Skip, SkipReason
from conveyor.engines.sqlite.database import migrate
from conveyor.engines.sqlite.sql import TABLES, Table, columns_sql, insert_sql
from tests.builders import (
    JOB,
    RUN,
    T0,
    a_batch,
    a_budget,
    a_feed,
    a_job,
    a_notice,
    a_record,
    a_run,
    a_schedule,
    a_scrub,
    a_share,
    a_stats,
    a_task,
    an_event,
    an_export,
    an_input,
    some_keys,
)

PROBLEM = Problem(type="about:blank", title="No", status=502, code="x", detail="é\x00'\"")
BY_TYPE = {table.row_type: table for table in TABLES.values()}

ROWS = [
    a_job(),
    a_job(
        format=Format.PDF,
        params={"js_render": "true", "é": "'"},
        metadata={"a": "b"},
        webhook=Webhook("https://example.com", signature=True),
        latest_run_id=RUN,
    ),
    a_run(),
    a_run(
        pause_state=PauseState.PAUSED,
        last_batch_received=True,
        ingest_status=IngestStatus.DONE,
        failure_reason=RunFailure.INSUFFICIENT_CREDITS,
        source_run_ids=(RUN, RunId("other")),
        ended_at=T0,
    ),
    a_batch(),
    a_batch(source=StagedList("jobs/1/source", RUN, BatchId("0")), cursor="c"),
    a_batch(source=UploadedList("key", ListSpec(ListFormat.CSV), 9, "sha", RUN, BatchId("0"))),
    a_batch(source=RowsOf(RUN, frozenset({TaskStatus.FAILED}))),
    a_stats(),
    a_stats(3, done=2**40, cost_micros=-1),
    a_task(),
    a_task(
        method=Method.POST,
        metadata={},
        params={"a": "b"},
        result=Result("key", 2, "sha", "text/html", 200),
        problem=PROBLEM,
        reason=FailureReason.BLOCKED,
        history=(Attempt(1, T0, T0 + 1, PROBLEM, 1, 25), Attempt(2, T0, T0 + 2)),
        started_at=T0 + 0.123456,
    ),
    a_record(),
    a_record(response_status=201, response_body="{}"),
    a_notice(),
    a_notice(
        last_error="timeout",
        tries=(DeliveryAttempt(T0, 0.5, 200), DeliveryAttempt(T0, 1.0, error="timeout")),
    ),
    a_scrub(),
    a_scrub(run_id=RUN),
    an_event(),
    an_event(job_id=JOB, run_id=RUN, seq=3),
    a_feed(),
    some_keys(),
    some_keys(candidate=SigningKey("kid", T0, "v1.sealed")),
    a_schedule(),
    a_schedule(
        rule=Calendar(("09:00",), "UTC", month_days=(1, 31)),
        skips=(Skip(T0, T0 + 1, SkipReason.MISSED),),
    ),
    an_input(spec=ListSpec(ListFormat.CSV, url="link", header=True, delimiter="\t")),
    an_export(),
    an_export(key="jobs/1", sha256="ab", error="full"),
    a_budget(left=-1),
    a_share(taken=2**53),
]


@pytest.fixture
def connection() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    migrate(connection)
    return connection


@pytest.mark.parametrize("row", ROWS, ids=lambda row: type(row).__name__)
def test_a_row_comes_back_as_it_was(connection: sqlite3.Connection, row: object) -> None:
    table = BY_TYPE[type(row)]  # type: ignore[index]

    connection.execute(insert_sql(table), table.to_row(row))  # type: ignore[arg-type]

    (stored,) = connection.execute(f"SELECT {columns_sql(table)} FROM {table.name}").fetchall()
    back = table.from_row(stored)
    assert back == row
    assert [type(getattr(back, name)) for name in table.columns] == [
        type(getattr(row, name)) for name in table.columns
    ]


def test_there_is_a_sample_of_every_kind_of_row() -> None:
    assert {type(row) for row in ROWS} == {*BY_TYPE}


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: table.name)
def test_a_table_has_a_column_for_each_field(connection: sqlite3.Connection, table: Table) -> None:
    columns = [name for _, name, *_ in connection.execute(f"PRAGMA table_info({table.name})")]

    assert sorted(columns) == sorted(table.columns)


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: table.name)
def test_a_row_is_found_by_its_key_through_an_index(
    connection: sqlite3.Connection, table: Table
) -> None:
    where = " AND ".join(f"{name} = 1" for name in table.key_columns)

    plan = connection.execute(f"EXPLAIN QUERY PLAN SELECT * FROM {table.name} WHERE {where}")

    assert [step.split()[0] for *_, step in plan] == ["SEARCH"]
