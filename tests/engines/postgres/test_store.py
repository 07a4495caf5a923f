"""What only this store has: task tables of long runs, transactions that meet, damaged rows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from random import Random

import msgspec
import pytest
import trio

from conveyor.domain.changes import Applied, Change, Guard, Insert, RunKey, TaskKey, Update
from conveyor.domain.damage import DamagedTask
from conveyor.domain.model import TaskRef
from conveyor.domain.queries import TasksAt, TasksOf
from conveyor.engines.postgres import database as pool
from conveyor.engines.postgres import task_tables
from conveyor.engines.postgres.connection import BEGIN, COMMIT, Statement
from conveyor.engines.postgres.database import DatabaseConfig
from conveyor.engines.postgres.engine import PostgresEngine, open_postgres
from conveyor.ports.errors import PartlyUnavailable, StorageFull, Unavailable
from tests.builders import JOB, RUN, ManualClock, a_run, a_task
from tests.postgres import execute


@pytest.fixture
async def engine(url: str, clock: ManualClock) -> AsyncIterator[PostgresEngine]:
    async with open_postgres(
        DatabaseConfig(url=url), random=Random(1), instant=clock.steady
    ) as engine:
        yield engine


_LONG = task_tables.OWN_TABLE_TASKS_MIN


async def _insert(engine: PostgresEngine, *tasks: object, planned: int = 0) -> None:
    run = Insert(RunKey(JOB, RUN), a_run(planned=planned))
    assert isinstance((await engine.store.commit([Change((run,))]))[0], Applied)
    writes = tuple(Insert(_key(task), task) for task in tasks)  # type: ignore[arg-type]
    assert isinstance((await engine.store.commit([Change(writes)]))[0], Applied)


def _key(task: object) -> TaskKey:
    return TaskKey(JOB, task.run_id, task.task_id, task.shard)  # type: ignore[attr-defined]


async def test_the_tasks_of_a_long_run_are_in_a_table_of_their_own(
    engine: PostgresEngine, url: str
) -> None:
    task = a_task()

    await _insert(engine, task, planned=_LONG)

    assert await execute(url, "SELECT count(*) FROM ONLY tasks") == [(0,)]
    assert await engine.store.read(_key(task)) == task
    ref = TaskRef(job_id=JOB, run_id=RUN, task_id=task.task_id, shard=task.shard)
    assert await engine.store.find(TasksAt(refs=(ref,))) == [task]
    query = TasksOf(job_id=JOB, run_id=RUN, shard_count=1, limit=10)
    assert await engine.store.find(query) == [task]
    update = Update(_key(task), Guard(equals=(("claim", 0),)), {"claim": 1})
    (verdict,) = await engine.store.commit([Change((update,))])
    assert verdict == Applied((msgspec.structs.replace(task, claim=1),))


async def test_deleting_a_long_run_drops_its_table(engine: PostgresEngine, url: str) -> None:
    task = a_task()
    await _insert(engine, task, planned=_LONG)

    while await engine.store.delete_run_rows(JOB, RUN, limit=10):
        pass

    assert await execute(url, "SELECT count(*) FROM task_tables") == [(0,)]
    assert await execute(url, f"SELECT to_regclass('\"tasks_{RUN}\"')::text") == [(None,)]
    assert await engine.store.read(_key(task)) is None


async def test_a_process_that_knew_a_dropped_table_finds_no_rows(
    engine: PostgresEngine, url: str
) -> None:
    task = a_task()
    await _insert(engine, task, planned=_LONG)
    assert await engine.store.read(_key(task)) == task

    # As another process deletes the run.
    await execute(url, f'DROP TABLE "tasks_{RUN}"', "DELETE FROM task_tables")

    assert await engine.store.read(_key(task)) is None
    update = Change((Update(_key(task), Guard(), {"claim": 1}),))
    (verdict,) = await engine.store.commit([update])
    assert not isinstance(verdict, Applied)


async def test_transactions_of_many_processes_that_meet_lose_no_count(url: str) -> None:
    key = RunKey(JOB, RUN)
    bump = Change((Update(key, Guard(), deltas={"total": 1}),))

    async with (
        open_postgres(DatabaseConfig(url=url), random=Random(1)) as one,
        open_postgres(DatabaseConfig(url=url), random=Random(2)) as other,
    ):
        await one.store.commit([Change((Insert(key, a_run()),))])
        async with trio.open_nursery() as nursery:
            for number in range(60):
                store = (one, other)[number % 2].store
                nursery.start_soon(store.commit, [bump])
        run = await one.store.read(key)

    assert run is not None
    assert run.total == 60


async def test_of_two_processes_that_insert_the_same_row_one_is_refused(url: str) -> None:
    key = RunKey(JOB, RUN)
    verdicts: list[object] = []

    async def insert(engine: PostgresEngine) -> None:
        verdicts.extend(await engine.store.commit([Change((Insert(key, a_run()),))]))

    async with (
        open_postgres(DatabaseConfig(url=url), random=Random(1)) as one,
        open_postgres(DatabaseConfig(url=url), random=Random(2)) as other,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(insert, one)
        nursery.start_soon(insert, other)

    assert [isinstance(verdict, Applied) for verdict in verdicts].count(True) == 1


async def test_a_lock_that_is_not_released_certainly_wrote_nothing(
    engine: PostgresEngine, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = RunKey(JOB, RUN)
    await _insert(engine, a_task())
    monkeypatch.setitem(pool._SESSION, "lock_timeout", "50")

    async with open_postgres(DatabaseConfig(url=url), random=Random(2)) as other:
        async with engine.database.connection() as holder:
            await holder.run([BEGIN, Statement("SELECT FROM runs FOR UPDATE")])
            with pytest.raises(PartlyUnavailable) as raised:
                await other.store.commit([Change((Update(key, Guard(), {"total": 5}),))])
            await holder.run([COMMIT])

        run = await other.store.read(key)
    assert raised.value.turned_away == {0}
    assert run is not None
    assert run.total == 0


async def test_a_damaged_task_can_still_be_ended(engine: PostgresEngine, url: str) -> None:
    task = a_task()
    await _insert(engine, task)
    await execute(url, "UPDATE tasks SET metadata = '{broken'")

    damaged = await engine.store.read(_key(task))
    assert isinstance(damaged, DamagedTask)
    end = Update(_key(task), Guard(equals=(("claim", 0),)), {"claim": 1, "metadata": None})
    (verdict,) = await engine.store.commit([Change((end,))])

    assert isinstance(verdict, Applied)
    assert await engine.store.read(_key(task)) == msgspec.structs.replace(task, claim=1)


async def test_a_guard_on_a_damaged_field_fails(engine: PostgresEngine, url: str) -> None:
    task = a_task()
    await _insert(engine, task)
    await execute(url, "UPDATE tasks SET status = 'unheard'")

    update = Update(_key(task), Guard(status_in=frozenset({task.status})), {"claim": 1})
    (verdict,) = await engine.store.commit([Change((update,))])

    assert not isinstance(verdict, Applied)


def _trigger(body: str, kind: str = "TRIGGER") -> list[str]:
    """Statements that let the server do this when a run changes."""
    timing = "AFTER UPDATE ON runs DEFERRABLE INITIALLY DEFERRED"
    if kind == "TRIGGER":
        timing = "BEFORE UPDATE ON runs"
    function = f"CREATE FUNCTION hurt() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body} END $$"
    trigger = f"CREATE {kind} hurt {timing} FOR EACH ROW EXECUTE FUNCTION hurt()"
    return [function, trigger]


@pytest.mark.parametrize("state", ["40P01", "40001"])
async def test_a_deadlock_or_a_serialization_failure_is_repeated(
    engine: PostgresEngine, url: str, state: str
) -> None:
    key = RunKey(JOB, RUN)
    await _insert(engine, a_task())
    failing = f"RAISE EXCEPTION 'injected' USING ERRCODE = '{state}';"
    body = f"IF nextval('failures') <= 2 THEN {failing} END IF; RETURN NEW;"
    await execute(url, "CREATE SEQUENCE failures", *_trigger(body))
    try:
        (verdict,) = await engine.store.commit([Change((Update(key, Guard(), {"total": 5}),))])
    finally:
        await execute(url, "DROP FUNCTION hurt CASCADE", "DROP SEQUENCE failures")

    assert isinstance(verdict, Applied)
    run = await engine.store.read(key)
    assert run is not None
    assert run.total == 5


async def test_a_connection_that_is_lost_at_the_commit_leaves_the_outcome_unknown(
    engine: PostgresEngine, url: str
) -> None:
    await _insert(engine, a_task())
    body = "PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NULL;"
    await execute(url, *_trigger(body, "CONSTRAINT TRIGGER"))
    try:
        with pytest.raises(Unavailable) as raised:
            await engine.store.commit([Change((Update(RunKey(JOB, RUN), Guard(), {"total": 5}),))])
    finally:
        await execute(url, "DROP FUNCTION hurt CASCADE")

    assert not isinstance(raised.value, PartlyUnavailable)


@pytest.mark.parametrize("state", ["53200", "53100"])
async def test_a_statement_that_is_refused_certainly_wrote_nothing(
    engine: PostgresEngine, url: str, state: str
) -> None:
    key = RunKey(JOB, RUN)
    await _insert(engine, a_task())
    await execute(url, *_trigger(f"RAISE EXCEPTION 'no room' USING ERRCODE = '{state}';"))
    try:
        with pytest.raises((PartlyUnavailable, StorageFull)) as raised:
            await engine.store.commit([Change((Update(key, Guard(), {"total": 5}),))])
    finally:
        await execute(url, "DROP FUNCTION hurt CASCADE")

    assert isinstance(raised.value, StorageFull) == (state == "53100")
    run = await engine.store.read(key)
    assert run is not None
    assert run.total == 0
