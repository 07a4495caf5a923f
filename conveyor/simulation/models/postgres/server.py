"""The modelled PostgreSQL server: committed rows, sessions with their uncommitted rows, and row
locks (docs/simulator.md, Model of PostgreSQL).

It has READ COMMITTED, as the engine uses it: a statement sees the rows that are committed when it
reads them, and those that its own transaction wrote. A session that changes or locks a row waits
for the holder of the row's lock, up to the lock timeout. A wait that would close a circle fails as
a deadlock. A call goes on when its client has disconnected.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import outcome
import trio
from psycopg import errors as psycopg_errors
from psycopg.errors import Error, OperationalError

from conveyor.engines.postgres.connection import BEGIN, COMMIT, ROLLBACK, Answer, Statement
from conveyor.engines.postgres.database import IDLE_IN_TRANSACTION_MS, LOCK_MS
from conveyor.engines.postgres.errors import DEADLOCK, SERIALIZATION

Row = dict[str, Any]
Address = tuple[str, tuple[Any, ...]]
Execute = Callable[["Session", Statement], Awaitable[Answer]]

LOCK_TIMEOUT, STATEMENT_TIMEOUT, ABORTED = "55P03", "57014", "25P02"
#: Unlogged tables: a crash empties them.
UNLOGGED = frozenset({"leases", "host_pools", "status_reports"})


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """The probability per call of each disturbance. `lost_commit` loses the connection at a COMMIT,
    which then has or has not happened; `crash` ends the server, which restarts at once."""

    cut: float = 0.0
    lost_commit: float = 0.0
    serialization: float = 0.0
    deadlock: float = 0.0
    statement_timeout: float = 0.0
    crash: float = 0.0


CALM = Faults()


class Refused(Exception):
    """A statement failed; `sqlstate` is the code of PostgreSQL."""

    def __init__(self, sqlstate: str) -> None:
        super().__init__(sqlstate)
        self.sqlstate = sqlstate


@dataclass(slots=True, eq=False)
class Session:
    """The session of one connection. `written` has the rows of its open transaction; None is a
    deleted row."""

    server: Server
    written: dict[Address, Row | None] = field(default_factory=dict)
    locks: set[Address] = field(default_factory=set)
    is_open: bool = False
    has_failed: bool = False
    is_durable: bool = True
    is_lost: bool = False
    calls_count: int = 0

    def rows(self, table: str) -> Iterator[tuple[tuple[Any, ...], Row]]:
        """The rows of a table as this session sees them."""
        committed = list(self.server.tables.get(table, {}).items())
        if not self.written:
            yield from committed
            return
        for key, row in committed:
            if (table, key) not in self.written:
                yield key, row
        for (name, key), own in list(self.written.items()):
            if name == table and own is not None:
                yield key, own

    def row(self, table: str, key: tuple[Any, ...]) -> Row | None:
        if (table, key) in self.written:
            return self.written[table, key]
        return self.server.tables.get(table, {}).get(key)

    def write(self, table: str, key: tuple[Any, ...], row: Row | None) -> None:
        assert (table, key) in self.locks
        self.written[table, key] = row

    async def lock(self, table: str, key: tuple[Any, ...]) -> None:
        await self.server.lock(self, (table, key))

    def is_free(self, table: str, key: tuple[Any, ...]) -> bool:
        """Whether another session holds no lock on the row, so that SKIP LOCKED would return it."""
        return self.server.holders.get((table, key), self) is self

    def number(self) -> int:
        self.server.newest_number += 1
        return self.server.newest_number


@dataclass(slots=True, eq=False)
class Server:
    """The committed rows, the sessions and the row locks of one server."""

    execute: Execute
    random: Random
    faults: Faults = CALM
    latency_s: float = 0.0
    tables: dict[str, dict[tuple[Any, ...], Row]] = field(default_factory=dict)
    holders: dict[Address, Session] = field(default_factory=dict)
    newest_number: int = 0
    fault_counts: dict[str, int] = field(default_factory=dict)
    _waiting: dict[Session, Session] = field(default_factory=dict)
    _released: trio.Event = field(default_factory=trio.Event)
    _sessions: set[Session] = field(default_factory=set)
    # The previous versions of rows that commits with synchronous_commit=off replaced, since the
    # last durable commit.
    _unsynced: list[tuple[Address, Row | None]] = field(default_factory=list)

    def connect(self) -> Session:
        session = Session(self)
        self._sessions.add(session)
        return session

    def crash(self) -> None:
        """Ends every session. Commits that were not durable are undone, and unlogged tables are
        emptied."""
        for session in list(self._sessions):
            self.close(session)
        for (table, key), row in reversed(self._unsynced):
            self._put(table, key, row)
        self._unsynced.clear()
        for table in UNLOGGED:
            self.tables.pop(table, None)

    def close(self, session: Session) -> None:
        session.is_lost = True
        self._sessions.discard(session)
        self._end(session)

    async def call(self, session: Session, statements: Sequence[Statement]) -> list[Answer]:
        """Runs all statements between two Syncs of the protocol, in a task of the server; raises
        what a client would get."""
        session.calls_count += 1
        await self._delay()
        if session.is_lost:
            raise OperationalError("the connection is lost")
        self._disturb(session, statements)
        was_open, answers = session.is_open, []
        try:
            for statement in statements:
                answers.append(await self._one(session, statement))
                if session.is_lost:
                    raise OperationalError("the server closed the connection")
        except Refused as refusal:
            session.has_failed = session.is_open
            if not session.is_open:
                self._end(session)
            raise server_error(refusal.sqlstate) from None
        if not session.is_open and not was_open:
            self._commit(session)
        await self._delay()
        if session.is_lost:
            raise OperationalError("the server closed the connection")
        if session.is_open:
            trio.lowlevel.spawn_system_task(self._end_idle, session, session.calls_count)
        return answers

    async def lock(self, session: Session, address: Address) -> None:
        with trio.move_on_after(LOCK_MS / 1000):
            while (holder := self.holders.get(address, session)) is not session:
                self._waiting[session] = holder
                try:
                    if self._is_circle(session):
                        raise Refused(DEADLOCK)
                    await self._released.wait()
                finally:
                    self._waiting.pop(session, None)
                if session.is_lost:
                    raise OperationalError("the server closed the connection")
            self.holders[address] = session
            session.locks.add(address)
            return
        raise Refused(LOCK_TIMEOUT)

    async def _one(self, session: Session, statement: Statement) -> Answer:
        if statement == ROLLBACK:
            self._end(session)
        elif session.has_failed:
            raise Refused(ABORTED)
        elif statement == BEGIN:
            session.is_open = True
        elif statement == COMMIT:
            self._commit_or_lose(session)
        else:
            return await self.execute(session, statement)
        return Answer([], 0)

    def _disturb(self, session: Session, statements: Sequence[Statement]) -> None:
        faults = self.faults
        if self._occurs("crash", faults.crash):
            self.crash()
        elif self._occurs("cut", faults.cut):
            self.close(session)
        if session.is_lost:
            raise OperationalError("the server closed the connection")
        if self._occurs("statement_timeout", faults.statement_timeout):
            self._refuse(session, STATEMENT_TIMEOUT)
        # Only a transaction of several statements can conflict with another one.
        if not session.is_open and BEGIN not in statements:
            return
        if self._occurs("serialization", faults.serialization):
            self._refuse(session, SERIALIZATION)
        if self._occurs("deadlock", faults.deadlock):
            self._refuse(session, DEADLOCK)

    def _refuse(self, session: Session, sqlstate: str) -> None:
        session.has_failed = session.is_open
        raise server_error(sqlstate)

    def _commit_or_lose(self, session: Session) -> None:
        if not self._occurs("lost_commit", self.faults.lost_commit):
            self._commit(session)
            return
        if self.random.random() < 0.5:
            self._commit(session)
        self.close(session)

    def _commit(self, session: Session) -> None:
        if session.is_durable:
            self._unsynced.clear()
        for (table, key), row in session.written.items():
            if not session.is_durable:
                self._unsynced.append(((table, key), self.tables.get(table, {}).get(key)))
            self._put(table, key, row)
        self._end(session)

    def _put(self, table: str, key: tuple[Any, ...], row: Row | None) -> None:
        rows = self.tables.setdefault(table, {})
        if row is None:
            rows.pop(key, None)
        else:
            rows[key] = row

    def _end(self, session: Session) -> None:
        for address in session.locks:
            self.holders.pop(address, None)
        session.written, session.locks = {}, set()
        session.is_open, session.has_failed, session.is_durable = False, False, True
        released, self._released = self._released, trio.Event()
        released.set()

    async def _end_idle(self, session: Session, calls_count: int) -> None:
        """Closes the session of a client that leaves its transaction idle for too long."""
        await trio.sleep(IDLE_IN_TRANSACTION_MS / 1000)
        if session.is_open and session.calls_count == calls_count:
            self.close(session)

    def _is_circle(self, session: Session) -> bool:
        holder = self._waiting.get(session)
        while holder is not None and holder is not session:
            holder = self._waiting.get(holder)
        return holder is session

    def _occurs(self, name: str, rate: float) -> bool:
        occurs = rate > 0 and self.random.random() < rate
        if occurs:
            self.fault_counts[name] = self.fault_counts.get(name, 0) + 1
        return occurs

    async def _delay(self) -> None:
        if self.latency_s:
            await trio.sleep(self.random.uniform(0.0, self.latency_s))
        else:
            await trio.lowlevel.checkpoint()


def server_error(sqlstate: str) -> Error:
    """The psycopg error for a statement that the server refused."""
    kind = psycopg_errors.lookup(sqlstate)
    diag = SimpleNamespace(severity_nonlocalized="ERROR", message_primary=None)
    kind_with_state = type(kind.__name__, (kind,), {"diag": diag, "sqlstate": sqlstate})
    error: Error = kind_with_state(f"the model refused: {sqlstate}")
    return error


class ModelConnection:
    """A connection for the engine's pool. `is_alive` returns False once the process is dead: then
    nothing reaches the server."""

    def __init__(self, server: Server, is_alive: Callable[[], bool]) -> None:
        self._server = server
        self._session = server.connect()
        self._is_alive = is_alive
        self._call: _Call | None = None

    @property
    def is_busy(self) -> bool:
        return self._call is not None

    @property
    def is_idle(self) -> bool:
        return not self._session.is_open

    @property
    def is_usable(self) -> bool:
        return not self._session.is_lost

    async def run(self, statements: Sequence[Statement]) -> list[Answer]:
        return await self._wait(lambda: self._server.call(self._session, statements))

    async def copy(self, table: str, pieces: Sequence[bytes]) -> int:
        text = b"".join(pieces).decode()
        statement = Statement(f"COPY {table}", [text])
        answers = await self._wait(lambda: self._server.call(self._session, [statement]))
        return answers[0].rows_count

    async def _wait(self, work: Callable[[], Awaitable[list[Answer]]]) -> list[Answer]:
        if not self._is_alive() or self._session.is_lost:
            self.close()
            raise OperationalError("the connection is lost")
        call = self._call = _Call()
        trio.lowlevel.spawn_system_task(call.do, work)
        await call.done.wait()
        self._call = None
        return call.unwrap()

    async def finish(self) -> None:
        """Waits for a call whose task was cancelled, and rolls its transaction back."""
        if self._call is not None:
            await self._call.done.wait()
            self._call = None
        if not self.is_idle:
            await self.run([ROLLBACK])

    def close(self) -> None:
        self._server.close(self._session)


@dataclass(slots=True, eq=False)
class _Call:
    """A call that runs in a task of the server, also after its client was cancelled."""

    done: trio.Event = field(default_factory=trio.Event)
    result: outcome.Outcome[list[Answer]] | None = None

    async def do(self, work: Callable[[], Awaitable[list[Answer]]]) -> None:
        self.result = await outcome.acapture(work)
        self.done.set()

    def unwrap(self) -> list[Answer]:
        assert self.result is not None
        return self.result.unwrap()
