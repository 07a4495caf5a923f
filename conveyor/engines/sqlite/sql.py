"""SQL of rows: the statements that read and write them (docs/engines.md, Embedded engine).

SQLite has no booleans; they are stored as 0 and 1.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from conveyor.domain.changes import AnyKey, Delete, Guard, Insert, Row, Update
from conveyor.engines.sql_mapping import Convert, Table, make_tables

TABLES = make_tables()


# Statements: the SQL of reads and guarded writes. Its text is built once per shape.
#
# The shape is everything that the text depends on: the table, the names of the fields, and the
# number of statuses that a guard admits. Values are always parameters and never part of the text.
# So the cache of prepared statements hits, and no value can change the meaning of a statement.


# The number of admitted statuses; the fields that must equal a value; the field that must be before
# an instant; the field that must be at least a number.
_Shape = tuple[int | None, tuple[str, ...], str | None, str | None]


def select(connection: sqlite3.Connection, key: AnyKey) -> Any:
    """Returns the row with this key, or None."""
    table = TABLES[type(key)]
    # The key is unique, so there is at most one row.
    rows = fetch(connection, table, _select_sql(table), table.address(key))
    return next(rows, None)


def fetch(
    connection: sqlite3.Connection, table: Table, sql: str, parameters: Sequence[Any]
) -> Iterator[Any]:
    """Returns the rows of a SELECT of all columns, decoded one by one.

    The iterator raises RowDamaged for a row that cannot be decoded, and then continues with the
    next row. It is therefore a `map` and not a generator, which would end with the first error.
    """
    try:
        rows, decode = connection.execute(sql, parameters).fetchall(), table.from_row
    except sqlite3.OperationalError as error:
        if not _is_no_text(error):
            raise
        rows, decode = _fetch_bytes(connection, sql, parameters), table.from_bytes
    return map(decode, rows)


def _fetch_bytes(
    connection: sqlite3.Connection, sql: str, parameters: Sequence[Any]
) -> list[tuple[Any, ...]]:
    # The factory belongs to the connection, which other reads use afterwards: it is always reset.
    connection.text_factory = bytes
    try:
        return connection.execute(sql, parameters).fetchall()
    finally:
        connection.text_factory = str


def _is_no_text(error: sqlite3.OperationalError) -> bool:
    """Recognises a stored text that is not UTF-8 by its message: CPython gives no error code."""
    return str(error).startswith("Could not decode to UTF-8")


def holds(connection: sqlite3.Connection, key: AnyKey, guard: Guard) -> bool | None:
    """Returns whether the row with this key passes the guard, or None if there is no row."""
    table = TABLES[type(key)]
    parameters = [*_guard_values(table, guard), *table.address(key)]
    row = connection.execute(_holds_sql(table, _shape(guard)), parameters).fetchone()
    return None if row is None else bool(row[0])


def insert(connection: sqlite3.Connection, write: Insert) -> Row | None:
    """Inserts the row if there is none, or only an expired one. Returns None if refused."""
    table = TABLES[type(write.key)]
    if write.over_expired_at is None:
        cursor = connection.execute(insert_sql(table), table.to_row(write.row))
    else:
        parameters = [*table.to_row(write.row), write.over_expired_at]
        cursor = connection.execute(_insert_over_expired_sql(table), parameters)
    return write.row if cursor.rowcount else None


def update(connection: sqlite3.Connection, write: Update) -> Row | bool:
    """Updates the row if it exists and passes the guard.

    Returns the row, or True for a quiet write, or False if refused.
    """
    table = TABLES[type(write.key)]
    plan = _plan(
        table, tuple(write.values), tuple(write.deltas), _shape(write.guard), write.is_quiet
    )
    parameters = [
        value if encode is None or value is None else encode(value)
        for encode, value in zip(plan.encoders, write.values.values(), strict=True)
    ]
    parameters += write.deltas.values()
    parameters += table.address(write.key)
    parameters += _guard_values(table, write.guard)
    cursor = connection.execute(plan.sql, parameters)
    if write.is_quiet:
        return cursor.rowcount == 1
    try:
        row = cursor.fetchone()
    except sqlite3.OperationalError as error:
        if not _is_no_text(error):
            raise
        # The row was written, but one of its texts is not UTF-8. `select` can read such a row.
        current_row: Row = select(connection, write.key)
        return current_row
    return False if row is None else table.from_row(row)


def delete(connection: sqlite3.Connection, write: Delete) -> bool:
    """Deletes the row if it exists and passes the guard. Returns whether it did."""
    table = TABLES[type(write.key)]
    parameters = [*table.address(write.key), *_guard_values(table, write.guard)]
    cursor = connection.execute(_delete_sql(table, _shape(write.guard)), parameters)
    return cursor.rowcount == 1


@lru_cache
def insert_sql(table: Table) -> str:
    marks = ", ".join("?" * len(table.columns))
    # An existing row is an answer and not an error: `rowcount` states whether the row was inserted.
    return (
        f"INSERT INTO {table.name} ({columns_sql(table)}) VALUES ({marks}) ON CONFLICT DO NOTHING"
    )


@lru_cache
def columns_sql(table: Table) -> str:
    return ", ".join(f'"{name}"' for name in table.columns)


@lru_cache
def _select_sql(table: Table) -> str:
    return f"SELECT {columns_sql(table)} FROM {table.name} WHERE {_address_sql(table)}"


@lru_cache
def _holds_sql(table: Table, shape: _Shape) -> str:
    return f"SELECT {_guard_sql(table, shape)} FROM {table.name} WHERE {_address_sql(table)}"


@lru_cache
def _insert_over_expired_sql(table: Table) -> str:
    plain = insert_sql(table).removesuffix("ON CONFLICT DO NOTHING")
    target = ", ".join(table.key_columns)
    # One statement instead of a delete and an insert: the guard on `expires_at` and the write
    # cannot be separated.
    values = ", ".join(f'"{name}" = excluded."{name}"' for name in table.columns)
    return (
        f"{plain} ON CONFLICT ({target}) DO UPDATE SET {values} WHERE {table.name}.expires_at < ?"
    )


class _Plan(NamedTuple):
    """The statement for updates of one shape, and the encoders of its values."""

    sql: str
    encoders: tuple[Convert | None, ...]


@lru_cache(maxsize=1024)
def _plan(
    table: Table, values: tuple[str, ...], deltas: tuple[str, ...], shape: _Shape, is_quiet: bool
) -> _Plan:
    assert {*values, *deltas} <= {*table.columns}, (table.name, values, deltas)
    assert not {*values} & {*deltas}, (table.name, values, deltas)
    where = f"WHERE {_address_sql(table)} AND {_guard_sql(table, shape)}"
    sets = [f'"{name}" = ?' for name in values] + [f'"{name}" = "{name}" + ?' for name in deltas]
    encoders = tuple(table.encoders.get(name) for name in values)
    if not sets:  # An update without values only checks its guard.
        return _Plan(f"SELECT {columns_sql(table)} FROM {table.name} {where}", encoders)
    sql = f"UPDATE {table.name} SET {', '.join(sets)} {where}"
    return _Plan(sql if is_quiet else f"{sql} RETURNING {columns_sql(table)}", encoders)


@lru_cache
def _delete_sql(table: Table, shape: _Shape) -> str:
    return f"DELETE FROM {table.name} WHERE {_address_sql(table)} AND {_guard_sql(table, shape)}"


def _address_sql(table: Table) -> str:
    return " AND ".join(f"{name} = ?" for name in table.key_columns)


def _shape(guard: Guard) -> _Shape:
    equals, lapsed = guard.equals, guard.lapsed
    return (
        None if guard.status_in is None else len(guard.status_in),
        tuple([name for name, _ in equals]) if equals else (),
        None if lapsed is None else lapsed[0],
        None if guard.at_least is None else guard.at_least[0],
    )


def _guard_sql(table: Table, shape: _Shape) -> str:
    status_count, equals, lapsed, at_least = shape
    assert {*equals} <= {*table.columns}, (table.name, equals)
    facts = [] if status_count is None else [f"status IN ({', '.join('?' * status_count)})"]
    # IS and not =, because a guard may require NULL.
    facts += [f'"{name}" IS ?' for name in equals]
    if lapsed is not None:
        assert lapsed in table.columns, (table.name, lapsed)
        facts.append(f'"{lapsed}" < ?')
    if at_least is not None:
        assert at_least in table.columns, (table.name, at_least)
        facts.append(f'"{at_least}" >= ?')
    return " AND ".join(facts) or "TRUE"


def _guard_values(table: Table, guard: Guard) -> list[Any]:
    values: list[Any] = [] if guard.status_in is None else [*map(str.__str__, guard.status_in)]
    values += [table.to_column(name, value) for name, value in guard.equals]
    if guard.lapsed is not None:
        values.append(guard.lapsed[1])
    if guard.at_least is not None:
        values.append(guard.at_least[1])
    return values
