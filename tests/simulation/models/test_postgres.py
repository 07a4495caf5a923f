"""Tests the model of PostgreSQL: its transactions, locks and faults. tests/conformance runs the
laws of the ports on it, as on the real server."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from random import Random
from typing import Any

import pytest
import trio
from psycopg.errors import DeadlockDetected, LockNotAvailable, OperationalError

from conveyor.domain.changes import JobKey
from conveyor.engines.postgres import queue
from conveyor.engines.postgres.connection import BEGIN, COMMIT, Answer, Statement
from conveyor.engines.postgres.database import Database, DatabaseConfig, open_database
from conveyor.engines.postgres.store import PostgresStore
from conveyor.ports.errors import PartlyUnavailable, Unavailable
from conveyor.simulation.models.postgres.server import CALM, Faults, ModelConnection, Server
from conveyor.simulation.models.postgres.statements import execute
from tests.builders import JOB, a_change, a_job, insert, update

_LOCK = "SELECT run_id FROM task_tables WHERE run_id = $1 FOR UPDATE"
_PUT = "INSERT INTO task_tables (run_id, job_id) VALUES ($1, $2)"
_READ = "SELECT job_id FROM task_tables WHERE run_id = $1"


@pytest.fixture
def server(autojump_clock: trio.testing.MockClock) -> Server:
    return Server(execute, Random(1))


def _connection(server: Server) -> ModelConnection:
    return ModelConnection(server, lambda: True)


def _database(server: Server) -> AbstractAsyncContextManager[Database]:
    async def connect() -> Any:
        return _connection(server)

    return open_database(DatabaseConfig(url=""), connect=connect)


async def _put(server: Server, *run_ids: str) -> None:
    await _connection(server).run([Statement(_PUT, (run_id, "job")) for run_id in run_ids])


async def _read(server: Server, run_id: str) -> Answer:
    (answer,) = await _connection(server).run([Statement(_READ, (run_id,))])
    return answer


async def test_others_see_a_transaction_when_it_commits(server: Server) -> None:
    writer = _connection(server)
    await writer.run([BEGIN, Statement(_PUT, ("a", "job"))])

    before = await _read(server, "a")
    await writer.run([COMMIT])

    assert before.rows == []
    assert (await _read(server, "a")).rows == [("job",)]


async def test_a_cycle_of_locks_is_a_deadlock(server: Server) -> None:
    await _put(server, "a", "b")
    one, two = _connection(server), _connection(server)
    await one.run([BEGIN, Statement(_LOCK, ("a",))])
    await two.run([BEGIN, Statement(_LOCK, ("b",))])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.run, [Statement(_LOCK, ("b",))])
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(DeadlockDetected):
            await two.run([Statement(_LOCK, ("a",))])
        await two.finish()


async def test_a_client_that_is_idle_in_a_transaction_loses_its_locks(server: Server) -> None:
    await _put(server, "a")
    stopped, other = _connection(server), _connection(server)
    await stopped.run([BEGIN, Statement(_LOCK, ("a",))])

    await other.run([BEGIN, Statement(_LOCK, ("a",)), COMMIT])

    with pytest.raises(OperationalError):
        await stopped.run([COMMIT])


async def test_waiting_for_a_lock_ends_with_the_timeout(
    server: Server,
) -> None:
    await _put(server, "a")
    holder, other = _connection(server), _connection(server)
    await holder.run([BEGIN, Statement(_LOCK, ("a",))])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(_keep_busy, holder)
        with pytest.raises(LockNotAvailable):
            await other.run([BEGIN, Statement(_LOCK, ("a",))])
        nursery.cancel_scope.cancel()


async def _keep_busy(connection: ModelConnection) -> None:
    while True:
        await connection.run([Statement(_READ, ("a",))])
        await trio.sleep(1)


async def test_a_call_continues_when_its_caller_is_cancelled(server: Server) -> None:
    server.latency_s = 1.0
    connection = _connection(server)

    with trio.move_on_after(0):
        await connection.run([Statement(_PUT, ("a", "job"))])
    await connection.finish()

    assert (await _read(server, "a")).rows == [("job",)]


async def test_a_connection_lost_during_commit_may_have_committed(server: Server) -> None:
    outcomes = set()
    async with _database(server) as database:
        store = PostgresStore(database, lambda: 0.0)
        await store.commit([a_change(insert(a_job(name="0")))])
        for name in map(str, range(1, 20)):
            server.faults = Faults(lost_commit=1.0)
            with pytest.raises(Unavailable) as raised:
                await store.commit([a_change(update(a_job(), name=name))])
            server.faults = CALM
            row = await store.read(JobKey(JOB))

            assert not isinstance(raised.value, PartlyUnavailable)
            assert row is not None
            outcomes.add(row.name == name)

    assert outcomes == {True, False}


async def test_serialization_failures_are_repeated(server: Server) -> None:
    async with _database(server) as database:
        store = PostgresStore(database, lambda: 0.0)
        await store.commit([a_change(insert(a_job()))])
        server.faults = Faults(serialization=0.1, deadlock=0.1)
        for name in map(str, range(20)):
            await store.commit([a_change(update(a_job(), name=name))])

        row = await store.read(JobKey(JOB))

    assert row is not None
    assert row.name == "19"
    assert server.fault_counts["serialization"] > 0


async def test_a_crash_loses_leases_and_acks_but_no_row(server: Server) -> None:
    async with _database(server) as database:
        store = PostgresStore(database, lambda: 0.0)
        await store.commit([a_change(insert(a_job()))])
        lease = {"lease_id": "l", "pool": "p", "run_id": "r", "expires_at": 1e12}
        server.tables["leases"] = {("l",): lease}
        message = {"message_id": 1, "queue_id": 1, "visible_at": 0.0, "receives": 1}
        server.tables["messages"] = {(1,): message}
        await database.run(queue.NOT_DURABLE, Statement(queue.ACK, ([1], [1])))
        assert server.tables["messages"] == {}

        server.crash()

        assert server.tables["messages"] == {(1,): message}
        assert "leases" not in server.tables
        assert await store.read(JobKey(JOB)) is not None


async def test_an_unknown_statement_is_an_error(server: Server) -> None:
    with pytest.raises(AssertionError, match="knows no such statement"):
        await _connection(server).run([Statement("SELECT version()")])
