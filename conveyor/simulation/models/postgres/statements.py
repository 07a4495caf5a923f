"""Executes the statements of the Postgres engine on the model (docs/simulator.md, Model of
PostgreSQL).

Statements on rows have few shapes, which are parsed. Statements on queues and leases are recognised
by their exact text. Any other statement raises an error, so that a new one cannot pass without a
model.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from conveyor.domain.changes import TaskKey
from conveyor.engines.postgres import coordinator, queue
from conveyor.engines.postgres.connection import Answer, Statement
from conveyor.engines.postgres.errors import UNDEFINED_TABLE, UNIQUE_VIOLATION
from conveyor.engines.postgres.sql import TABLES
from conveyor.simulation.models.postgres.server import Refused, Row, Session

Params = Sequence[Any]
Key = tuple[Any, ...]
Handler = Callable[[Session, Params], Awaitable[list[tuple[Any, ...]]]]
_Holds = Callable[[Row, Params, Session], bool]

_KEYS: Mapping[str, tuple[str, ...]] = {
    **{table.name: table.key_columns for table in TABLES.values()},
    "task_tables": ("run_id",),
    "leases": ("lease_id",),
    "host_pools": ("name",),
    "status_reports": ("subject", "owner"),
    "queues": ("queue_id",),
    "messages": ("message_id",),
}
_TASKS = TABLES[TaskKey]
# A long run has a table of its own, with the run id in its name.
_PLACE = r'(?:ONLY )?"?(?P<table>\w+)"?'
_SELECT = re.compile(
    rf"SELECT (?P<columns>.+?) FROM {_PLACE} WHERE (?P<where>.+?)"
    r"(?: ORDER BY (?P<order>[\w, ]+?))?(?: LIMIT (?:\$(?P<limit>\d+)|1 OFFSET \$(?P<at>\d+)))?"
    r"(?P<locks> FOR UPDATE)?\Z"
)
_INSERT = re.compile(
    rf"INSERT INTO {_PLACE} \((?P<columns>.+?)\) (?P<form>VALUES|SELECT) .+?"
    r"(?P<is_tolerant> ON CONFLICT DO NOTHING)?\Z"
)
_UPDATE = re.compile(rf"UPDATE {_PLACE} AS old SET (?P<sets>.+?) FROM unnest\(.+\) AS new .+\Z")
_DELETE_SOME = re.compile(
    rf"DELETE FROM {_PLACE} WHERE ctid = ANY\(ARRAY\(SELECT ctid FROM (?:ONLY )?\S+ "
    r"WHERE (?P<where>.+) LIMIT \$(?P<limit>\d+)\)\)\Z"
)
_DELETE = re.compile(rf"DELETE FROM {_PLACE} WHERE (?P<where>.+)\Z")
_CREATE = re.compile(rf"CREATE TABLE {_PLACE} \(LIKE tasks INCLUDING ALL\) .+\Z")
_DROP = re.compile(rf"DROP TABLE IF EXISTS {_PLACE}\Z")
_COPY = re.compile(rf"COPY {_PLACE} \((?P<columns>.+)\)\Z")
_NAME = re.compile(r"[a-z_]+")
_TERMS = (
    re.compile(r"(?P<column>\w+) (?P<sign>=|<|<=|>|>=) (?:\$(?P<param>\d+)|(?P<number>\d+))\Z"),
    re.compile(r"(?P<column>\w+) = ANY\(\$(?P<any>\d+)\)\Z"),
    re.compile(r"(?P<column>\w+) IN \((?P<list>[$\d, ]+)\)\Z"),
    re.compile(r"(?P<column>\w+) IS (?P<not>NOT NULL)\Z"),
    re.compile(r"\((?P<columns>[\w, ]+)\) (?P<sign><|>) \((?P<list>[$\d, ]+)\)\Z"),
    re.compile(
        r"(?P<column>run_id) IN \(SELECT run_id FROM runs WHERE job_id = \$(?P<job>\d+)\)\Z"
    ),
    re.compile(r"(?P<constant>TRUE|FALSE)\Z"),
)
_SIGNS: Mapping[str, Callable[[Any, Any], bool]] = {
    "=": lambda a, b: bool(a == b),
    "<": lambda a, b: bool(a < b),
    "<=": lambda a, b: bool(a <= b),
    ">": lambda a, b: bool(a > b),
    ">=": lambda a, b: bool(a >= b),
}
_ESCAPES = {"\\\\": "\\", "\\t": "\t", "\\n": "\n", "\\r": "\r"}


async def execute(session: Session, statement: Statement) -> Answer:
    """Executes one statement in a session."""
    params = [_stored(value) for value in statement.params]
    handler = _HANDLERS.get(statement.sql)
    if handler is not None:
        rows = await handler(session, params)
        return Answer(rows, len(rows))
    for pattern, act in _SHAPES:
        if (match := pattern.match(statement.sql)) is not None:
            _require_table(session, match["table"], act)
            return await act(session, match, params)
    raise AssertionError(f"the model knows no such statement: {statement.sql}")


def _stored(value: Any) -> Any:
    """The value as the server stores it: it accepts neither NUL characters nor lone surrogates."""
    if isinstance(value, str):
        return value.replace("\0", "\ufffd").encode("utf-8", "replace").decode()
    if isinstance(value, list | tuple):
        return [_stored(item) for item in value]
    return value


# Statements on rows, recognised by their shape.


def _require_table(session: Session, table: str, act: Any) -> None:
    if table in _KEYS or act in {_create, _drop}:
        return
    if session.row("tables", (table,)) is None:
        raise Refused(UNDEFINED_TABLE)


def _keys_of(table: str) -> tuple[str, ...]:
    return _KEYS.get(table, _TASKS.key_columns)


async def _create(session: Session, match: re.Match[str], params: Params) -> Answer:
    key = (match["table"],)
    await session.lock("tables", key)
    session.write("tables", key, {})
    return Answer([], 0)


async def _drop(session: Session, match: re.Match[str], params: Params) -> Answer:
    key = (match["table"],)
    await session.lock("tables", key)
    session.write("tables", key, None)
    for row_key, _ in session.rows(match["table"]):
        await session.lock(match["table"], row_key)
        session.write(match["table"], row_key, None)
    return Answer([], 0)


async def _select(session: Session, match: re.Match[str], params: Params) -> Answer:
    table, columns = match["table"], _names(match["columns"])
    keys = _matching(session, table, match["where"], params)
    for column, is_down in reversed(_order(match["order"])):
        keys.sort(key=lambda key: _row(session, table, key)[column], reverse=is_down)
    if match["limit"] is not None and (limit := params[int(match["limit"]) - 1]) is not None:
        keys = keys[:limit]
    if match["at"] is not None:
        at = params[int(match["at"]) - 1]
        keys = keys[at : at + 1]
    rows = []
    for key in keys:
        if match["locks"]:
            await session.lock(table, key)
        row = session.row(table, key)
        if row is not None and _holds(match["where"])(row, params, session):
            rows.append(tuple(row[name] for name in columns))
    return Answer(rows, len(rows))


async def _insert(session: Session, match: re.Match[str], params: Params) -> Answer:
    columns = _names(match["columns"])
    values = [params] if match["form"] == "VALUES" else list(zip(*params, strict=True))
    rows = [dict(zip(columns, row, strict=True)) for row in values]
    return await _put(session, match["table"], rows, is_tolerant=bool(match["is_tolerant"]))


async def _copy(session: Session, match: re.Match[str], params: Params) -> Answer:
    rows = [
        dict(zip(_TASKS.columns, map(_from_copy, _TASKS.stored_types, values), strict=True))
        for values in (line.split("\t") for line in params[0].split("\n") if line)
    ]
    return await _put(session, match["table"], rows, is_tolerant=False)


async def _put(session: Session, table: str, rows: Sequence[Row], *, is_tolerant: bool) -> Answer:
    count = 0
    for row in rows:
        key = tuple(row[name] for name in _keys_of(table))
        await session.lock(table, key)
        if session.row(table, key) is None:
            session.write(table, key, row)
            count += 1
        elif not is_tolerant:
            raise Refused(UNIQUE_VIOLATION)
    return Answer([], count)


async def _update(session: Session, match: re.Match[str], params: Params) -> Answer:
    table = match["table"]
    names = [sets.split(" = ")[0].strip('"') for sets in match["sets"].split(", ")]
    key_count = len(_keys_of(table))
    count = 0
    for values in zip(*params, strict=True):
        key = tuple(values[:key_count])
        await session.lock(table, key)
        if (row := session.row(table, key)) is not None:
            session.write(table, key, row | dict(zip(names, values[key_count:], strict=True)))
            count += 1
    return Answer([], count)


async def _delete(session: Session, match: re.Match[str], params: Params) -> Answer:
    groups = match.groupdict()
    keys = _matching(session, match["table"], match["where"], params)
    if groups.get("limit") is not None:
        keys = keys[: params[int(groups["limit"]) - 1]]
    count = 0
    for key in keys:
        await session.lock(match["table"], key)
        row = session.row(match["table"], key)
        if row is not None and _holds(match["where"])(row, params, session):
            session.write(match["table"], key, None)
            count += 1
    return Answer([], count)


_SHAPES = (
    (_CREATE, _create),
    (_DROP, _drop),
    (_SELECT, _select),
    (_INSERT, _insert),
    (_UPDATE, _update),
    (_DELETE_SOME, _delete),
    (_DELETE, _delete),
    (_COPY, _copy),
)


def _matching(session: Session, table: str, where: str, params: Params) -> list[Key]:
    """The keys of the matching rows, in order."""
    holds = _holds(where)
    return sorted(key for key, row in session.rows(table) if holds(row, params, session))


def _row(session: Session, table: str, key: Key) -> Row:
    row = session.row(table, key)
    assert row is not None
    return row


def _names(columns: str) -> list[str]:
    return [name.strip().strip('"') for name in columns.split(",")]


def _order(order: str | None) -> list[tuple[str, bool]]:
    parts = [part.strip().split(" ") for part in (order or "").split(",") if part.strip()]
    return [(part[0], part[-1] == "DESC") for part in parts]


def _from_copy(kind: type, text: str) -> Any:
    if text == "\\N":
        return None
    if kind is bool:
        return text == "t"
    if kind is not str:
        return kind(text)
    return re.sub(r"\\.", lambda match: _ESCAPES[match[0]], text)


@lru_cache
def _holds(where: str) -> _Holds:
    terms = [_term(text) for text in where.split(" AND ")]
    return lambda row, params, session: all(term(row, params, session) for term in terms)


def _term(text: str) -> _Holds:
    match = next((match for pattern in _TERMS if (match := pattern.match(text))), None)
    assert match is not None, f"the model knows no such condition: {text}"
    return _condition(match.groupdict())


def _condition(parts: Mapping[str, str | None]) -> _Holds:
    column = str(parts.get("column"))
    if (constant := parts.get("constant")) is not None:
        return lambda row, params, session: constant == "TRUE"
    if parts.get("not"):
        return lambda row, params, session: row[column] is not None
    if (at := parts.get("any")) is not None:
        return lambda row, params, session: row[column] in params[int(at) - 1]
    if (job := parts.get("job")) is not None:
        return lambda row, params, session: any(
            run["job_id"] == params[int(job) - 1] and run["run_id"] == row[column]
            for _, run in session.rows("runs")
        )
    if (marks := parts.get("list")) is not None:
        places = [int(mark.strip().removeprefix("$")) - 1 for mark in marks.split(",")]
        if (names := parts.get("columns")) is None:
            return lambda row, params, session: row[column] in [params[at] for at in places]
        compare, columns = _SIGNS[str(parts["sign"])], _names(names)
        return lambda row, params, session: compare(
            [row[name] for name in columns], [params[at] for at in places]
        )
    compare, number = _SIGNS[str(parts["sign"])], parts.get("number")
    if number is not None:
        return lambda row, params, session: compare(row[column], int(number))
    place = int(str(parts["param"])) - 1
    return lambda row, params, session: (
        row[column] is not None and compare(row[column], params[place])
    )


# Statements of the queue, recognised by their text.


class _Message(NamedTuple):
    """A row of the messages table with its key."""

    key: Key
    row: Row


def _queue_of(session: Session, run_id: Any) -> Any:
    return next(
        (row["queue_id"] for _, row in session.rows("queues") if row["run_id"] == run_id), None
    )


def _messages(session: Session, queue_id: Any) -> list[_Message]:
    own = [_Message(*item) for item in session.rows("messages") if item[1]["queue_id"] == queue_id]
    return sorted(own, key=lambda item: (item.row["visible_at"], item.key))


async def _open(session: Session, params: Params) -> list[tuple[Any, ...]]:
    for run_id in params[0]:
        # As with the unique index on run_id: a second session waits here, and then finds the queue.
        await session.lock("queue of run", (run_id,))
        if _queue_of(session, run_id) is None:
            key = (session.number(),)
            await session.lock("queues", key)
            session.write("queues", key, {"queue_id": key[0], "run_id": run_id})
    return []


async def _send(session: Session, params: Params) -> list[tuple[Any, ...]]:
    run_id, job_ids, task_ids, shards, at = params
    queue_id = _queue_of(session, run_id)
    if queue_id is None:
        return []
    for job_id, task_id, shard in zip(job_ids, task_ids, shards, strict=True):
        key = (session.number(),)
        await session.lock("messages", key)
        row = {"message_id": key[0], "queue_id": queue_id, "job_id": job_id, "task_id": task_id}
        session.write("messages", key, row | {"shard": shard, "visible_at": at, "receives": 0})
    return []


async def _receive(session: Session, params: Params) -> list[tuple[Any, ...]]:
    run_id, count_max, visibility_s, at = params
    queue_id = _queue_of(session, run_id)
    if queue_id is None:
        return []
    taken: list[tuple[Any, ...]] = []
    for key, row in _messages(session, queue_id):
        if len(taken) == count_max or row["visible_at"] > at:
            break
        if not session.is_free("messages", key):
            continue
        await session.lock("messages", key)
        receives = row["receives"] + 1
        session.write(
            "messages", key, row | {"visible_at": at + visibility_s, "receives": receives}
        )
        taken.append((key[0], receives, row["job_id"], row["task_id"], row["shard"]))
    return taken or [(None,) * 5]


async def _held(session: Session, params: Params) -> list[_Message]:
    """Locks the messages whose receipts are valid, and returns them."""
    held = []
    for message_id, receives in zip(params[0], params[1], strict=True):
        await session.lock("messages", (message_id,))
        row = session.row("messages", (message_id,))
        if row is not None and row["receives"] == receives:
            held.append(_Message((message_id,), row))
    return held


async def _hide(session: Session, params: Params) -> list[tuple[Any, ...]]:
    held = await _held(session, params)
    for key, row in held:
        session.write("messages", key, row | {"visible_at": params[3] + params[2]})
    return [(key[0], row["receives"]) for key, row in held]


async def _ack(session: Session, params: Params) -> list[tuple[Any, ...]]:
    for key, _ in await _held(session, params):
        session.write("messages", key, None)
    return []


async def _close(session: Session, params: Params) -> list[tuple[Any, ...]]:
    queue_id = _queue_of(session, params[0])
    if queue_id is None:
        return []
    await session.lock("queues", (queue_id,))
    row = _row(session, "queues", (queue_id,))
    if row["run_id"] != params[0]:
        return []
    session.write("queues", (queue_id,), row | {"run_id": None})
    return [(queue_id,)]


async def _closed(session: Session, params: Params) -> list[tuple[Any, ...]]:
    return sorted(key for key, row in session.rows("queues") if row["run_id"] is None)[:100]


async def _clear(session: Session, params: Params) -> list[tuple[Any, ...]]:
    gone = []
    for key, _ in _messages(session, params[0])[: params[1]]:
        if session.is_free("messages", key):
            await session.lock("messages", key)
            session.write("messages", key, None)
            gone.append(key)
    return gone


async def _remove(session: Session, params: Params) -> list[tuple[Any, ...]]:
    key = (params[0],)
    await session.lock("queues", key)
    row = session.row("queues", key)
    if row is not None and row["run_id"] is None and not _messages(session, params[0]):
        session.write("queues", key, None)
    return []


async def _depth(session: Session, params: Params) -> list[tuple[Any, ...]]:
    queue_id = _queue_of(session, params[0])
    rows = [] if queue_id is None else [row for _, row in _messages(session, queue_id)]
    return [(sum(row["visible_at"] <= params[1] for row in rows), len(rows))]


async def _existing_queues(session: Session, params: Params) -> list[tuple[Any, ...]]:
    there = []
    for run_id in params[0]:
        if (queue_id := _queue_of(session, run_id)) is not None:
            await session.lock("queues", (queue_id,))
            if _queue_of(session, run_id) is not None:
                there.append((run_id,))
    return there


async def _set_not_durable(session: Session, params: Params) -> list[tuple[Any, ...]]:
    session.is_durable = False
    return [("off",)]


# Statements of the coordinator, recognised by their text.


def _leases(session: Session, at: float, **where: Any) -> list[tuple[Key, Row]]:
    """The live leases with these column values."""
    return [
        (key, row)
        for key, row in session.rows("leases")
        if row["expires_at"] > at and all(row[name] == value for name, value in where.items())
    ]


async def _lease(session: Session, lease_id: str, pool: str, run_id: str, until: float) -> None:
    row = {"lease_id": lease_id, "pool": pool, "run_id": run_id, "expires_at": until}
    await session.lock("leases", (lease_id,))
    session.write("leases", (lease_id,), row)


async def _forget_leases(session: Session, pool: str, at: float) -> None:
    for key, row in list(session.rows("leases")):
        if row["pool"] == pool and row["expires_at"] <= at:
            await session.lock("leases", key)
            session.write("leases", key, None)


async def _acquire(session: Session, params: Params) -> list[tuple[Any, ...]]:
    pool, run_id, lease_ids, cap, ttl_s, at = params
    await session.lock("pool", (pool,))
    await _forget_leases(session, pool, at)
    free = max(cap - len(_leases(session, at, pool=pool)), 0)
    for lease_id in lease_ids[:free]:
        await _lease(session, lease_id, pool, run_id, at + ttl_s)
    return [(lease_id,) for lease_id in lease_ids[:free]]


async def _lock_pools(session: Session, params: Params) -> list[tuple[Any, ...]]:
    for name in sorted(set(params[0])):
        await session.lock("pool", (name,))
    return []


async def _enter(session: Session, params: Params) -> list[tuple[Any, ...]]:
    pool, lease_id, cap, spacing_s, slack_s, ttl_s, at = params
    await session.lock("pool", (pool,))
    host = session.row("host_pools", (pool,))
    due = None if host is None else host["next_at"]
    if due is None or due > at + spacing_s + slack_s:
        due = 0.0 if due is None else at
    if spacing_s > 0 and at < due - slack_s:
        return [(False,)]
    await _forget_leases(session, pool, at)
    if len(_leases(session, at, pool=pool)) >= cap:
        return [(False,)]
    await _lease(session, lease_id, pool, "", at + ttl_s)
    if spacing_s > 0:
        await session.lock("host_pools", (pool,))
        row = {"name": pool, "next_at": max(due, at) + spacing_s}
        session.write("host_pools", (pool,), row)
    return [(True,)]


async def _forget_hosts(session: Session, params: Params) -> list[tuple[Any, ...]]:
    for key, row in session.rows("host_pools"):
        if row["next_at"] < params[1] - params[0] and session.is_free("host_pools", key):
            await session.lock("host_pools", key)
            session.write("host_pools", key, None)
    return []


async def _renew(session: Session, params: Params) -> list[tuple[Any, ...]]:
    lease_ids, ttl_s, at = params
    renewed = []
    for lease_id in sorted(lease_ids):
        await session.lock("leases", (lease_id,))
        row = session.row("leases", (lease_id,))
        if row is not None and row["expires_at"] > at:
            session.write("leases", (lease_id,), row | {"expires_at": at + ttl_s})
            renewed.append((lease_id,))
    return renewed


async def _release(session: Session, params: Params) -> list[tuple[Any, ...]]:
    for lease_id in sorted(params[0]):
        await session.lock("leases", (lease_id,))
        session.write("leases", (lease_id,), None)
    return []


async def _count(session: Session, params: Params) -> list[tuple[Any, ...]]:
    return [(len(_leases(session, params[1], run_id=params[0])),)]


async def _report(session: Session, params: Params) -> list[tuple[Any, ...]]:
    owner, subjects, texts, ttl_s, at = params
    for subject, text in sorted(zip(subjects, texts, strict=True)):
        key = (subject, owner)
        await session.lock("status_reports", key)
        row = {"subject": subject, "owner": owner, "text": text, "expires_at": at + ttl_s}
        session.write("status_reports", key, row)
    return []


async def _forget_reports(session: Session, params: Params) -> list[tuple[Any, ...]]:
    for key, row in session.rows("status_reports"):
        if row["expires_at"] <= params[0] and session.is_free("status_reports", key):
            await session.lock("status_reports", key)
            session.write("status_reports", key, None)
    return []


async def _reports(session: Session, params: Params) -> list[tuple[Any, ...]]:
    subject, at = params
    return [
        (row["text"],)
        for key, row in sorted(session.rows("status_reports"))
        if key[0] == subject and row["expires_at"] > at
    ]


_HANDLERS: Mapping[str, Handler] = {
    queue.NOT_DURABLE.sql: _set_not_durable,
    queue.OPEN: _open,
    queue.SEND: _send,
    queue.RECEIVE: _receive,
    queue.HIDE: _hide,
    queue.ACK: _ack,
    queue.CLOSE: _close,
    queue.CLOSED: _closed,
    queue.CLEAR: _clear,
    queue.REMOVE: _remove,
    queue.DEPTH: _depth,
    queue.EXIST: _existing_queues,
    coordinator.ACQUIRE: _acquire,
    coordinator.LOCK_POOLS: _lock_pools,
    coordinator.ENTER: _enter,
    coordinator.FORGET_HOSTS: _forget_hosts,
    coordinator.RENEW: _renew,
    coordinator.RELEASE: _release,
    coordinator.COUNT: _count,
    coordinator.REPORT: _report,
    coordinator.FORGET_REPORTS: _forget_reports,
    coordinator.REPORTS: _reports,
}
