"""The database: a pool of connections to one PostgreSQL server, with deadlines
(docs/engines.md, Postgres engine).

A caller that is cancelled leaves at once. Its connection completes the call in the background, and
returns to the pool. Closing it instead would leave the statement running in the server, and the
next caller would pay for a new connection.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import outcome
import trio
from psycopg.errors import Error

from conveyor.engines.postgres.connection import Answer, Connection, Statement, connect
from conveyor.engines.postgres.errors import is_lost_connection, is_rolled_back, translated
from conveyor.ports.errors import Unavailable

T = TypeVar("T")
Connect = Callable[[], Awaitable[Connection]]

CONNECTIONS_MAX = 8
CONNECT_S = 5.0
# How long a caller waits for a connection of the pool.
ACQUIRE_S = 10.0
# A call that its caller has left may continue for so long.
_RECOVER_S = 5.0
# The server ends a statement after `statement_timeout`; the deadline of a call is later, so that it
# strikes only if the server does not answer at all.
CALL_S = 20.0
STATEMENT_MS = 15_000
# Another process that was stopped in the middle of a transaction holds its locks for so long.
IDLE_IN_TRANSACTION_MS = 5_000
LOCK_MS = 8_000
# Every query has an index (tests/engines/postgres/test_plans.py). The planner would still scan a
# table that was small when the statement was planned. Planning each execution again costs more than
# the execution.
_SESSION = {
    "statement_timeout": str(STATEMENT_MS),
    "lock_timeout": str(LOCK_MS),
    "idle_in_transaction_session_timeout": str(IDLE_IN_TRANSACTION_MS),
    "client_connection_check_interval": "2000",
    "enable_seqscan": "off",
    "plan_cache_mode": "force_generic_plan",
    "jit": "off",
}


class DatabaseConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where the database is, and how it may be used.

    `has_sessions` is False behind a pooler that gives each transaction another connection: then
    nothing may be kept in a connection, no prepared statement, setting or LISTEN.
    """

    url: str
    password_file: Path | None = None
    has_sessions: bool = True
    connections_max: int = CONNECTIONS_MAX


class Database:
    def __init__(
        self, config: DatabaseConfig, nursery: trio.Nursery, connect: Connect | None = None
    ) -> None:
        self._config = config
        self._nursery = nursery
        self._connect = connect or partial(connect_to, config)
        self._idle: list[Connection] = []
        self._readers: list[_Reader] = []
        self._limiter = trio.Semaphore(config.connections_max)

    @property
    def has_sessions(self) -> bool:
        return self._config.has_sessions

    async def run(self, *statements: Statement) -> list[Answer]:
        """Runs statements as one transaction, in one round trip."""
        async with self.connection() as connection:
            return await connection.run(statements)

    async def read(self, statement: Statement) -> Answer:
        """Runs a statement that changes nothing. Those of tasks that run at the same time share a
        round trip."""
        reader = _Reader(statement)
        self._readers.append(reader)
        if len(self._readers) == 1:
            self.start(self._read_together)
        await reader.done.wait()
        assert reader.result is not None
        return reader.result.unwrap()

    async def _read_together(self) -> None:
        readers, self._readers = self._readers, []
        try:
            for reader, result in zip(readers, await self._results_of(readers), strict=True):
                reader.result = result
        finally:
            for reader in readers:
                reader.done.set()

    async def _results_of(self, readers: Sequence[_Reader]) -> Sequence[outcome.Outcome[Answer]]:
        statements = [reader.statement for reader in readers]
        result = await outcome.acapture(self._read_repeatedly, statements)
        if isinstance(result, outcome.Value):
            return [outcome.Value(answer) for answer in result.unwrap()]
        if len(readers) == 1 or not _is_of_statement(result.error):
            # Each with an outcome of its own: it can be unwrapped once.
            return [outcome.Error(result.error) for _ in readers]
        # A mistake in one statement must not fail the others.
        return [(await self._results_of([reader]))[0] for reader in readers]

    async def _read_repeatedly(self, statements: Sequence[Statement]) -> list[Answer]:
        """Repeats the reads once if the connection is lost, as all connections are when the server
        restarts."""
        try:
            return await self.run(*statements)
        except Unavailable as error:
            if not is_lost_connection(error):
                raise
        return await self.run(*statements)

    async def write(self, statement: Statement) -> Answer:
        return (await self.run(statement))[0]

    async def run_detached(self, work: Callable[[], Awaitable[T]]) -> T:
        """Does work that continues if its caller is cancelled."""
        results: list[outcome.Outcome[T]] = []
        done = trio.Event()

        async def do() -> None:
            results.append(await outcome.acapture(work))
            done.set()

        self.start(do)
        await done.wait()
        return results[0].unwrap()

    def start(self, work: Callable[[], Awaitable[object]]) -> None:
        """Starts work that must not be interrupted half-way. The deadlines of its calls end it."""

        async def do() -> None:
            with trio.CancelScope(shield=True):
                await work()

        self._nursery.start_soon(do)

    @asynccontextmanager
    async def connection(self) -> AsyncGenerator[Connection, None]:
        """Lends a connection. Errors of the server become those of the ports."""
        with translated():
            with trio.fail_after(ACQUIRE_S):
                await self._limiter.acquire()
            connection: Connection | None = None
            try:
                connection = self._take_idle() or await self.connect()
                with trio.fail_after(CALL_S):
                    yield connection
            finally:
                if connection is None:
                    self._limiter.release()
                elif connection.is_busy or not connection.is_idle:
                    self._nursery.start_soon(self._recover, connection)
                else:
                    self._give_back(connection)

    async def connect(self) -> Connection:
        """Opens a connection of its own, which is not in the pool."""
        with trio.fail_after(CONNECT_S):
            return await self._connect()

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                return connection
            connection.close()
        return None

    async def _recover(self, connection: Connection) -> None:
        """Completes what a caller left behind, or closes the connection."""
        with trio.move_on_after(_RECOVER_S, shield=True):
            with suppress(Error, OSError, trio.ClosedResourceError):
                await connection.finish()
        self._give_back(connection)

    def _give_back(self, connection: Connection) -> None:
        if not connection.is_busy and connection.is_usable and connection.is_idle:
            self._idle.append(connection)
        else:
            connection.close()
        self._limiter.release()

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()


@dataclass(slots=True, eq=False)
class _Reader:
    statement: Statement
    done: trio.Event = field(default_factory=trio.Event)
    result: outcome.Outcome[Answer] | None = None


def _is_of_statement(error: BaseException) -> bool:
    """Whether the server refused one statement, in contrast to the whole call."""
    cause = error.__cause__ if isinstance(error, Unavailable) else error
    return isinstance(cause, Error) and is_rolled_back(cause)


async def connect_to(config: DatabaseConfig) -> Connection:
    return await connect(
        config.url,
        password=None if config.password_file is None else _password_in(config.password_file),
        options=_options() if config.has_sessions else "",
        prepares=config.has_sessions,
    )


def _password_in(path: Path) -> str:
    """Read for each connection: the file may hold a token that expires."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise OSError(f"CONVEYOR_DATABASE_PASSWORD_FILE cannot be read: {error}") from error


def _options() -> str:
    return " ".join(f"-c {name}={value}" for name, value in _SESSION.items())


@asynccontextmanager
async def open_database(
    config: DatabaseConfig, *, connect: Connect | None = None
) -> AsyncGenerator[Database, None]:
    """Opens the pool. Calls in progress end before it is closed. `connect` opens a connection, by
    default to the server of the config."""
    database: Database | None = None
    try:
        async with trio.open_nursery() as nursery:
            database = Database(config, nursery, connect)
            yield database
            nursery.cancel_scope.cancel()
    finally:
        if database is not None:
            database.close()
