"""SQL of rows: the statements that read and write them (docs/engines.md, Postgres engine).

Their text depends on the table and the names of columns, never on values, so that prepared
statements are found again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import count
from typing import Any

import msgspec

from conveyor.domain.changes import AnyKey, TaskKey
from conveyor.engines.postgres.connection import Statement
from conveyor.engines.sql_mapping import PLAIN, Table, make_tables

TABLES = make_tables(PLAIN | {bool})
_TYPES = {str: "text", int: "bigint", float: "double precision", bool: "boolean"}
_TASKS = TABLES[TaskKey]

# In the statements below, `place` is the name of the table: that of the kind, or the own table of a
# long run.


def lock_row(key: AnyKey) -> Statement:
    table = TABLES[type(key)]
    where = " AND ".join(f"{name} = ${n}" for n, name in enumerate(table.key_columns, start=1))
    sql = f"SELECT {columns_sql(table)} FROM {table.name} WHERE {where} FOR UPDATE"
    return Statement(sql, table.address(key))


def lock_tasks(place: str, run_id: str, task_ids: Sequence[str]) -> Statement:
    """Locks tasks in the order of their ids, as every transaction does: so none waits for another
    that waits for it."""
    sql = f"{_tasks_sql(place)} ORDER BY task_id FOR UPDATE"
    return Statement(sql, (run_id, task_ids))


def lock_counters(job_id: str, run_id: str, shards: Sequence[int], table: Table) -> Statement:
    sql = (
        f"SELECT {columns_sql(table)} FROM {table.name} "
        "WHERE job_id = $1 AND run_id = $2 AND shard = ANY($3) ORDER BY shard FOR UPDATE"
    )
    return Statement(sql, (job_id, run_id, shards))


def select_row(key: AnyKey, place: str) -> Statement:
    table = TABLES[type(key)]
    where = " AND ".join(f"{name} = ${n}" for n, name in enumerate(table.key_columns, start=1))
    return Statement(f"SELECT {columns_sql(table)} FROM {place} WHERE {where}", table.address(key))


def select_tasks(place: str, run_id: str, task_ids: Sequence[str]) -> Statement:
    return Statement(_tasks_sql(place), (run_id, task_ids))


def select_task_id_at(place: str, run_id: str, after: str, count: int) -> Statement:
    """Selects the id of the task that is `count` tasks behind another one."""
    sql = (
        f"SELECT task_id FROM {place} WHERE run_id = $1 AND task_id > $2 "
        "ORDER BY task_id LIMIT 1 OFFSET $3"
    )
    return Statement(sql, (run_id, after, count - 1))


def insert_rows(table: Table, place: str, rows: Sequence[msgspec.Struct]) -> Statement:
    """Inserts rows. A row that exists is an error of the server."""
    if len(rows) == 1:
        return Statement(_insert_one_sql(table, place), table.to_row(rows[0]))
    return Statement(_insert_sql(table, place), table.to_columns(rows))


def insert_absent_rows(table: Table, place: str, rows: Sequence[msgspec.Struct]) -> Statement:
    """Inserts the rows that do not exist yet."""
    text, params = insert_rows(table, place, rows)
    return Statement(f"{text} ON CONFLICT DO NOTHING", params)


def update_rows(
    table: Table,
    place: str,
    keys: Sequence[tuple[Any, ...]],
    names: tuple[str, ...],
    rows: Sequence[msgspec.Struct],
) -> Statement:
    """Sets the columns `names` of the rows with these keys."""
    values = [[table.to_column(name, getattr(row, name)) for row in rows] for name in names]
    sql = _update_sql(table, place, names)
    return Statement(sql, [*map(list, zip(*keys, strict=True)), *values])


def delete_row(table: Table, address: tuple[Any, ...], place: str) -> Statement:
    where = " AND ".join(f"{name} = ${n}" for n, name in enumerate(table.key_columns, start=1))
    return Statement(f"DELETE FROM {place} WHERE {where}", address)


def numbered(text: str) -> str:
    """Replaces the marks `?` by $1, $2 and so on."""
    parts = text.split("?")
    numbers = count(1)
    return parts[0] + "".join(f"${next(numbers)}{part}" for part in parts[1:])


@lru_cache
def columns_sql(table: Table) -> str:
    return ", ".join(f'"{name}"' for name in table.columns)


def _tasks_sql(place: str) -> str:
    return f"SELECT {columns_sql(_TASKS)} FROM {place} WHERE run_id = $1 AND task_id = ANY($2)"


@lru_cache(maxsize=1024)
def _insert_one_sql(table: Table, place: str) -> str:
    marks = ", ".join(f"${n}" for n in range(1, len(table.columns) + 1))
    return f"INSERT INTO {place} ({columns_sql(table)}) VALUES ({marks})"


@lru_cache(maxsize=1024)
def _insert_sql(table: Table, place: str) -> str:
    return (
        f"INSERT INTO {place} ({columns_sql(table)}) "
        f"SELECT * FROM unnest({_arrays(table, table.columns)})"
    )


@lru_cache(maxsize=1024)
def _update_sql(table: Table, place: str, names: tuple[str, ...]) -> str:
    columns = (*table.key_columns, *names)
    sets = ", ".join(f'"{name}" = new."{name}"' for name in names)
    where = " AND ".join(f"old.{name} = new.{name}" for name in table.key_columns)
    as_columns = ", ".join(f'"{name}"' for name in columns)
    return (
        f"UPDATE {place} AS old SET {sets} "
        f"FROM unnest({_arrays(table, columns)}) AS new ({as_columns}) WHERE {where}"
    )


def _arrays(table: Table, columns: Sequence[str]) -> str:
    types = dict(zip(table.columns, table.stored_types, strict=True))
    return ", ".join(f"${n}::{_TYPES[types[name]]}[]" for n, name in enumerate(columns, start=1))
