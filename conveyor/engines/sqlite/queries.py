"""Translates each query to SQL, in the order that the query promises (docs/storage.md, Queries)."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterator
from typing import Any, assert_never

from conveyor.domain.queries import (
    AnyQuery,
    BatchesIn,
    BatchesOf,
    DueExpiries,
    DueExports,
    DueNotices,
    DueSchedules,
    DueScrubs,
    EventsOf,
    ExpiredInputs,
    JobsOf,
    NoticesOf,
    RunsIn,
    RunsOf,
    StatsOf,
    TasksOf,
    UnplacedEvents,
)
from conveyor.engines.sqlite.row_mapping import (
    BATCHES,
    EVENTS,
    EXPORTS,
    INPUTS,
    JOBS,
    NOTICES,
    RUNS,
    SCHEDULES,
    SCRUBS,
    STATS,
    TASKS,
    Table,
)
from conveyor.engines.sqlite.sql import columns_sql, fetch
from conveyor.ports.errors import RowDamaged

_NO_LIMIT = -1  # SQLite reads a negative LIMIT as no limit.
_Term = tuple[str, Any]


def find(
    connection: sqlite3.Connection, query: AnyQuery, note_damage: Callable[[RowDamaged], None]
) -> list[Any]:
    """Returns the rows that can be decoded, up to the limit of the query.

    A query without a limit needs every row of a run, so it raises RowDamaged if one cannot be
    decoded.
    """
    table, terms, order, limit = _plan(query)
    where = " AND ".join(term for term, _ in terms)
    parameters = [value for _, values in terms for value in values]
    sql = f"SELECT {columns_sql(table)} FROM {table.name} WHERE {where} ORDER BY {order} LIMIT ?"
    # Counters and batches of a run: a missing row would make their sum wrong, so damage is raised.
    if limit == _NO_LIMIT:
        return list(fetch(connection, table, sql, [*parameters, limit]))
    # A damaged row must not shorten the page: callers take a short page for the last one. So read
    # again with a limit that is larger by the damaged rows, until the page is full or the rows end.
    skipped = 0
    while True:
        read_max = limit + skipped
        rows, damages = _split(fetch(connection, table, sql, [*parameters, read_max]))
        if len(damages) == skipped or len(rows) + len(damages) < read_max:
            for each in damages:
                note_damage(each)
            return rows
        skipped = len(damages)


def _split(rows: Iterator[Any]) -> tuple[list[Any], list[RowDamaged]]:
    good: list[Any] = []
    damages: list[RowDamaged] = []
    while True:
        try:
            good.extend(rows)
        except RowDamaged as error:
            damages.append(error)
        else:
            return good, damages


def _plan(query: AnyQuery) -> tuple[Table, list[_Term], str, int]:  # noqa: C901, PLR0912 (one branch a kind)
    match query:
        case TasksOf():
            return TASKS, _tasks_of(query), "task_id", query.limit
        case StatsOf():
            return STATS, _in_run(query), "shard", _NO_LIMIT
        case JobsOf():
            return JOBS, _jobs_of(query), "job_id DESC", query.limit
        case RunsOf():
            return RUNS, _runs_of(query), "sequence DESC", query.limit
        case BatchesOf():
            return BATCHES, _in_run(query), "created_at, batch_id", _NO_LIMIT
        case RunsIn():
            return RUNS, _runs_in(query), "run_id", query.limit
        case BatchesIn():
            terms = [_status_in(query.statuses), ("updated_at <= ?", [query.idle_since])]
            return BATCHES, terms, "updated_at, run_id, batch_id", query.limit
        case DueNotices():
            terms = [_status_in(query.statuses), ("due_at <= ?", [query.due_by])]
            return NOTICES, terms, "due_at, notice_id", query.limit
        case NoticesOf():
            order = "run_id DESC, occurred_at DESC, notice_id DESC"
            return NOTICES, _notices_of(query), order, query.limit
        case DueScrubs():
            return SCRUBS, [("due_at <= ?", [query.due_by])], "due_at, scrub_id", query.limit
        case EventsOf():
            terms = [("caller = ?", [query.caller]), ("seq > 0 AND seq > ?", [query.after])]
            return EVENTS, terms, "seq", query.limit
        case UnplacedEvents():
            terms = [("seq = 0 AND occurred_at < ?", [query.before])]
            return EVENTS, terms, "occurred_at, event_id", query.limit
        case DueSchedules():
            return SCHEDULES, _due_schedules(query), "next_fire_at, job_id", query.limit
        case DueExports():
            return EXPORTS, [("due_at <= ?", [query.due_by])], "due_at, export_id", query.limit
        case DueExpiries():
            return RUNS, [("sweep_at <= ?", [query.due_by])], "sweep_at, run_id", query.limit
        case ExpiredInputs():
            terms = [("expires_at <= ?", [query.expired_by])]
            return INPUTS, terms, "expires_at, input_id", query.limit
        case _:
            assert_never(query)


def _tasks_of(query: TasksOf) -> list[_Term]:
    terms: list[_Term] = [("run_id = ?", [query.run_id]), ("task_id > ?", [query.after or ""])]
    if query.statuses is not None:
        terms.append(_status_in(query.statuses))
    if query.have_problems:  # This term selects the partial index of tasks with problems.
        terms.append(("problem IS NOT NULL", []))
    return terms


def _jobs_of(query: JobsOf) -> list[_Term]:
    terms: list[_Term] = [("caller = ?", [query.caller]), _status_in(query.statuses)]
    if query.type is not None:
        terms.append(("type = ?", [str(query.type)]))
    if query.external_id is not None:
        terms.append(("external_id = ?", [query.external_id]))
    if query.before is not None:
        terms.append(("job_id < ?", [query.before]))
    return terms


def _runs_of(query: RunsOf) -> list[_Term]:
    terms: list[_Term] = [("job_id = ?", [query.job_id]), _status_in(query.statuses)]
    if query.before is not None:
        terms.append(("sequence < ?", [query.before]))
    return terms


def _runs_in(query: RunsIn) -> list[_Term]:
    terms = [_status_in(query.statuses), ("updated_at >= ?", [query.updated_since])]
    if query.after is not None:
        terms.append(("run_id > ?", [query.after]))
    return terms


def _notices_of(query: NoticesOf) -> list[_Term]:
    terms: list[_Term] = [("job_id = ?", [query.job_id])]
    if query.run_id is not None:
        terms.append(("run_id = ?", [query.run_id]))
    if query.before is not None:
        terms.append(("(run_id, occurred_at, notice_id) < (?, ?, ?)", query.before))
    return terms


def _due_schedules(query: DueSchedules) -> list[_Term]:
    terms = [_status_in(query.statuses), ("next_fire_at <= ?", [query.due_by])]
    if query.after is not None:
        terms.append(("(next_fire_at, job_id) > (?, ?)", [*query.after]))
    return terms


def _in_run(query: StatsOf | BatchesOf) -> list[_Term]:
    return [("job_id = ?", [query.job_id]), ("run_id = ?", [query.run_id])]


def _status_in(statuses: Collection[str]) -> _Term:
    marks = ", ".join("?" * len(statuses))
    return f"status IN ({marks})", [str.__str__(status) for status in statuses]
