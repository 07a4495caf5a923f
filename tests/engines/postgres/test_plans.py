"""Every statement has an index: none scans a whole table, however large it becomes. A page of rare
tasks reads no more rows than it may.

The statements are those that the engine sends while all of it is used. Every piece of SQL in its
modules must be among them, so a new statement without a use here fails too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from conveyor.domain import limits
from conveyor.domain.changes import (
    ANY,
    BatchKey,
    Change,
    Chunk,
    Delete,
    Enqueue,
    Insert,
    TaskKey,
    Update,
)
from conveyor.domain.ids import JobId, RunId
from conveyor.domain.model import CounterState, TaskStatus
from conveyor.domain.queries import TasksAt, TasksOf
from conveyor.engines import postgres
from conveyor.engines.postgres.connection import Answer, Connection, Statement
from conveyor.engines.postgres.database import DatabaseConfig
from conveyor.engines.postgres.engine import PostgresEngine, open_postgres
from conveyor.engines.postgres.signals import Notifier
from conveyor.engines.postgres.task_tables import OWN_TABLE_TASKS_MIN
from conveyor.ports.coordinator import HostPool
from tests.builders import (
    JOB,
    RUN,
    T0,
    ManualClock,
    a_batch,
    a_ref,
    a_run,
    a_stats,
    a_task,
    insert,
)
from tests.conformance.sample_queries import make_questions
from tests.postgres import execute

# As an operator's tables after weeks. The ids come in order, because a million random entries of an
# index take a minute to make.
_ROWS = 1_000_000
_FILL = f"""
INSERT INTO tasks (run_id, task_id, shard, batch_id, index, url, status, created_at, updated_at,
    method, claim, claim_until, attempts, handed_back, history, credits, cost_micros, problem)
SELECT 'run' || n / {_ROWS // 40}, lpad(n::text, 9, '0'), 0, '0', n, 'https://a.example/',
    CASE WHEN n % 5000 = 0 THEN 'successful' WHEN n % 10 = 0 THEN 'failed' ELSE 'pending' END,
    n, n, 'GET', 0, 0, 0, 0, '[]', 0, 0, CASE WHEN n % 10 = 0 AND n % 5000 <> 0 THEN '{{}}' END
FROM generate_series(1, {_ROWS}) AS n
"""
_FILL_MESSAGES = f"""
INSERT INTO messages (queue_id, job_id, task_id, shard, visible_at, receives)
SELECT n / {_ROWS // 40}, 'job', lpad(n::text, 9, '0'), 0, n, 0
FROM generate_series(1, {_ROWS}) AS n
"""
_RARE = (TaskStatus.SUCCESSFUL, TaskStatus.PROCESSING)
_VERBS = ("SELECT ", "INSERT ", "UPDATE ", "DELETE ", "WITH ")
# Statements of a start and of a migration, which happen once: their tables are read whole.
_ONCE = frozenset({"check.py", "engine.py", "migration.py", "schema.py"})
# A run with five tasks that were successful, among 25,000.
_FILLED = RunId("run1")
_READ_MAX = limits.ROWS_READ_MAX
# What the functions of the schema do inside.
_IN_FUNCTIONS = (
    "DELETE FROM leases WHERE pool = 'p' AND expires_at <= 1",
    "SELECT count(*) FROM leases WHERE pool = 'p'",
    "SELECT next_at FROM host_pools WHERE name = 'p'",
)
# Tables of a few rows, which every reader needs whole; and indexes whose every entry is due.
_SMALL = frozenset({"schema_versions", "secret_checks", "engine_migrations"})
_QUEUES = frozenset({"queues_closed", "control_messages_pkey", "crossings_by_age"})


async def test_no_statement_scans_a_table(
    url: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    statements: dict[str, Statement] = {}
    run = Connection.run

    async def recording(self: Connection, given: Sequence[Statement]) -> list[Answer]:
        statements.update({statement.sql: statement for statement in given})
        return await run(self, given)

    monkeypatch.setattr(Connection, "run", recording)
    await execute(url, _FILL, _FILL_MESSAGES, "ANALYZE tasks", "ANALYZE messages")
    async with open_postgres(
        DatabaseConfig(url=url), random=Random(1), instant=clock.steady
    ) as engine:
        await _use_everything(engine)
        monkeypatch.undo()
        used = list(statements)
        statements.update({sql: Statement(sql) for sql in _IN_FUNCTIONS})

        scans = {}
        for statement in statements.values():
            if not statement.sql.lstrip().startswith(_VERBS):
                continue
            nodes = await _explain(engine, "FORMAT JSON", statement)
            if found := [node for node in nodes if _is_scan(node)]:
                scans[statement.sql] = found
    # The next test gets these tables, and would delete a million rows one by one.
    await execute(url, "TRUNCATE tasks, messages")

    assert [pieces for pieces in _written_sql() if not _is_used(pieces, used)] == []
    assert scans == {}


@pytest.mark.parametrize(
    ("status", "rows_read_max"),
    # Failed tasks have an index. The end of another page is found first, and then its rows.
    [(None, 11), (TaskStatus.FAILED, 11), *((status, 2 * _READ_MAX + 11) for status in _RARE)],
)
async def test_a_page_reads_few_rows_more_than_it_returns(
    url: str, monkeypatch: pytest.MonkeyPatch, status: TaskStatus | None, rows_read_max: int
) -> None:
    statements: list[Statement] = []
    run = Connection.run

    async def recording(self: Connection, given: Sequence[Statement]) -> list[Answer]:
        statements.extend(given)
        return await run(self, given)

    await execute(url, _FILL.replace(str(_ROWS), "100000"), "ANALYZE tasks")
    async with open_postgres(DatabaseConfig(url=url), random=Random(1)) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(Connection, "run", recording)
            page = await engine.store.page_tasks(_page_of(status), read_max=_READ_MAX)
        nodes = [
            node
            for statement in statements
            if "tasks" in statement.sql
            for node in await _explain(engine, "ANALYZE, FORMAT JSON", statement)
            if "Index Name" in node
        ]
    await execute(url, "TRUNCATE tasks")

    assert page.until is not None
    assert nodes
    read = sum(node["Actual Rows"] + node.get("Rows Removed by Filter", 0) for node in nodes)
    assert read <= rows_read_max


def _page_of(status: TaskStatus | None) -> TasksOf:
    statuses = None if status is None else frozenset({status})
    return TasksOf(job_id=JOB, run_id=_FILLED, shard_count=1, statuses=statuses, limit=10)


async def _explain(
    engine: PostgresEngine, options: str, statement: Statement
) -> list[dict[str, Any]]:
    explain = Statement(f"EXPLAIN ({options}) {statement.sql}", statement.params)
    ((plan,),) = (await engine.database.read(explain)).rows
    return list(_nodes(plan[0]["Plan"]))


def _written_sql() -> list[tuple[str, ...]]:
    """Every text in the engine's modules that begins like a statement, without its variables."""
    (folder,) = postgres.__path__
    return [
        pieces
        for path in sorted(Path(folder).glob("*.py"))
        if path.name not in _ONCE
        for node in ast.walk(ast.parse(path.read_text()))
        if (pieces := _pieces(node)) and pieces[0].lstrip().startswith(_VERBS)
        # Without a table there is nothing to scan.
        if any(f" {word} " in " ".join(pieces) for word in ("FROM", "INTO", "UPDATE"))
    ]


def _pieces(node: ast.AST) -> tuple[str, ...]:
    match node:
        case ast.Constant(value=str() as text):
            return (text,)
        case ast.JoinedStr(values=values):
            return tuple(str(part.value) for part in values if isinstance(part, ast.Constant))
    return ()


def _is_used(pieces: tuple[str, ...], used: Sequence[str]) -> bool:
    # Marks become numbers.
    return any(all(piece.rstrip(" ?") in sql for piece in pieces) for sql in used)


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for inner in plan.get("Plans", ()):
        yield from _nodes(inner)


def _is_scan(node: dict[str, Any]) -> bool:
    """Whether the node reads a whole table, or a whole index: the planner prefers that where no
    index fits, because the engine's sessions discourage sequential scans."""
    if node["Node Type"] == "Seq Scan":
        return node["Relation Name"] not in _SMALL
    if "Index" in node["Node Type"]:
        return "Index Cond" not in node and node["Index Name"] not in _QUEUES
    return False


async def _use_everything(engine: PostgresEngine) -> None:
    store, queue, coordinator = engine.store, engine.queue, engine.coordinator
    await store.commit([Change((insert(a_batch()), insert(a_stats())))])
    tasks = [a_task(index) for index in (1, 2)]
    await store.commit([Change(tuple(map(insert, tasks)))])
    # A long run has a table of its own.
    long = a_run(run_id=RunId("long"), planned=OWN_TABLE_TASKS_MIN)
    await store.commit([Change((insert(long),))])
    await store.delete_run_rows(JOB, long.run_id, limit=100)
    task = a_task()
    key = TaskKey(JOB, RUN, task.task_id, task.shard)
    await store.commit([Change((Insert(key, task),), (Enqueue((a_ref(0),)),))])
    await store.commit([Change((Update(key, ANY, {"claim": 1}),))])
    await store.commit([Change((Delete(key),))])
    chunk = Chunk(
        key=BatchKey(JOB, RUN, a_batch().batch_id),
        epoch=0,
        done_before=0,
        tasks=(task,),
        refs=(a_ref(0),),
        stats={0: {"admitted": 1}},
        values={"done": 1},
        gate_in=frozenset({CounterState.OPEN}),
    )
    await store.put_chunk(chunk)
    for ask in make_questions(JOB, RUN, now=T0, after=task.task_id):
        await ask(store)
    await store.page_tasks(_page_of(TaskStatus.SUCCESSFUL), read_max=_READ_MAX)
    await store.find(TasksAt(refs=(a_ref(0),)))
    await store.delete_expired(1.0)
    messages = await queue.receive(RUN, count_max=10, visibility_s=10)
    await queue.extend(messages, visibility_s=10)
    await queue.bounce(messages, delay_s=0)
    await queue.ack(messages)
    await queue.send([a_ref(0)])
    await queue.depth(RUN)
    await queue.close_run(RUN)
    leases = await coordinator.acquire(JOB, RUN, count_max=2, cap=2, ttl_s=10)
    await coordinator.renew(leases, ttl_s=10)
    await coordinator.count(RUN)
    await coordinator.acquire_hosts([HostPool(JOB, "h", 1, 1.0)], ttl_s=10)
    await coordinator.release(leases)
    await coordinator.put_status("owner", {"subject": "text"}, ttl_s=10)
    await coordinator.list_status("subject")
    await store.delete_run_rows(JOB, RUN, limit=100)
    await store.delete_run_rows(JOB, None, limit=100)
    notifier = Notifier(engine.database)
    await notifier.run_changed(JOB, RUN)
    await notifier.batch_opened(JOB, RUN)
    await notifier._take_batches(_ignore)


async def _ignore(job_id: JobId, run_id: RunId) -> None:
    pass
