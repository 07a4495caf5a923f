"""A connection to PostgreSQL on Trio: psycopg's own protocol generators, driven by Trio's waiting
(docs/engines.md, Postgres engine).

psycopg separates the protocol from the waiting: a generator yields what it waits for, and the
caller waits. Here Trio waits. The alternative, psycopg's asyncio connections through trio-asyncio,
costs 310 to 550 us of CPU per query instead of 75 to 110.

A connection is always in pipeline mode: all statements of a call are sent at once, followed by one
Sync, and make one transaction unless they contain BEGIN. So a call is one round trip.
"""

from __future__ import annotations

import select
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import count, groupby, islice, repeat
from typing import Any, Generic, NamedTuple, TypeVar

import trio
from psycopg import generators, pq
from psycopg.adapt import Transformer
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.errors import Error, ProgrammingError, error_from_result
from psycopg.pq.abc import PGconn, PGresult

from conveyor.engines.postgres.errors import BadDatabaseUrl

T = TypeVar("T")
Param = str | int | float | bool | Sequence[Any] | None

_BINARY = pq.Format.BINARY
_COMMAND_OK = pq.ExecStatus.COMMAND_OK
_DONE = frozenset({_COMMAND_OK, pq.ExecStatus.TUPLES_OK})
_COPY_IN = pq.ExecStatus.COPY_IN
_IDLE = pq.TransactionStatus.IDLE
_READ, _WRITE = 1, 2  # The values of psycopg's Wait and Ready, which are bit masks.
# Each prepared statement occupies memory of the server. Statements are as many as shapes of writes
# and queries, times the runs that have a table of their own.
_PREPARED_MAX = 400
# Larger pieces hold the Trio thread longer, smaller ones need more system calls.
_COPY_BYTES = 128 * 1024
_COPY_ROWS = 250


class Statement(NamedTuple):
    sql: str
    params: Sequence[Param] = ()


class Answer(NamedTuple):
    """The rows of a statement, and how many rows it read or changed."""

    rows: list[tuple[Any, ...]]
    rows_count: int


_FORGET = Statement("DEALLOCATE ALL")
BEGIN, COMMIT, ROLLBACK = Statement("BEGIN"), Statement("COMMIT"), Statement("ROLLBACK")


class Connection:
    """One task uses it at a time. `finish` completes a call whose task was cancelled."""

    def __init__(self, pgconn: PGconn, *, prepares: bool) -> None:
        self._pgconn = pgconn
        self._prepares = prepares
        self._prepared: dict[str, bytes] = {}
        self._numbers = count()
        self._transformer = Transformer()
        self._call: _Call[Any] | None = None
        self._is_closed = False
        pgconn.enter_pipeline_mode()

    @property
    def is_busy(self) -> bool:
        """Whether a call was cancelled before its end."""
        return self._call is not None

    @property
    def is_idle(self) -> bool:
        return self._pgconn.transaction_status == _IDLE

    @property
    def is_usable(self) -> bool:
        """Whether an idle connection still has its server. A server that ended has closed the
        socket, which is then readable."""
        if self._is_closed or self._pgconn.status != pq.ConnStatus.OK:
            return False
        return not _ready_now(self._pgconn.socket, _READ)

    async def run(self, statements: Sequence[Statement]) -> list[Answer]:
        """Runs the statements in one round trip. Raises the first error of the server; then none of
        them has an effect, unless one of them was COMMIT and came before."""
        if len(self._prepared) > _PREPARED_MAX and self.is_idle:
            self._prepared.clear()
            return (await self._wait(self._exchange([_FORGET, *statements])))[1:]
        return await self._wait(self._exchange(statements))

    async def copy(self, table: str, pieces: Iterable[bytes]) -> int:
        """Appends the rows to a table, `table` with its columns. Returns how many there were."""
        # The protocol has no COPY in pipeline mode.
        self._pgconn.exit_pipeline_mode()
        count = await self._wait(self._copy(f"COPY {table} FROM STDIN", pieces))
        self._pgconn.enter_pipeline_mode()
        return count

    async def listen(self, channel: str) -> None:
        await self.run([Statement(f'LISTEN "{channel}"')])

    async def notifications(self) -> list[str]:
        """Waits for notifications, and returns their payloads."""
        # A notification that came with an earlier answer is in psycopg's buffer already.
        while not (payloads := self._take_notifications()):
            await trio.lowlevel.wait_readable(self._pgconn.socket)
            self._pgconn.consume_input()
        return payloads

    def _take_notifications(self) -> list[str]:
        payloads = []
        while (notification := self._pgconn.notifies()) is not None:
            payloads.append(notification.extra.decode())
        return payloads

    async def finish(self) -> None:
        """Completes a call whose task was cancelled, and rolls its transaction back."""
        if self._call is not None:
            with suppress(Error):
                await self._call.wait()
            self._call = None
        if not self.is_idle:
            await self.run([ROLLBACK])

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._pgconn.status == pq.ConnStatus.OK:
            trio.lowlevel.notify_closing(self._pgconn.socket)
        self._pgconn.finish()

    async def _wait(self, steps: Generator[int, int, T]) -> T:
        call = self._call = _Call(self._pgconn.socket, steps)
        try:
            result: T = await call.wait()
        finally:
            if call.has_ended:
                self._call = None
        return result

    def _exchange(self, statements: Sequence[Statement]) -> Generator[int, int, list[Answer]]:
        pgconn = self._pgconn
        new: dict[str, bytes] = {}
        # What each result answers: the statement that it prepared, or None for an execution.
        results_of: list[str | None] = []
        for sql, params in statements:
            values = [_encode(value) for value in params]
            if not self._prepares or not params:
                pgconn.send_query_params(sql.encode(), values, result_format=_BINARY)
            else:
                name = self._prepared.get(sql) or new.get(sql)
                if name is None:
                    name = new[sql] = b"s%d" % next(self._numbers)
                    pgconn.send_prepare(name, sql.encode())
                    results_of.append(sql)
                pgconn.send_query_prepared(name, values, result_format=_BINARY)
            results_of.append(None)
        pgconn.pipeline_sync()
        yield from generators.send(pgconn)
        answers: list[Answer] = []
        refusal: PGresult | None = None
        for prepared in results_of:
            (result,) = yield from generators.fetch_many(pgconn)
            if result.status in _DONE:
                if prepared is None:
                    answers.append(self._answer(result))
                else:
                    self._prepared[prepared] = new[prepared]
            elif refusal is None:
                refusal = result
        yield from generators.fetch_many(pgconn)  # The Sync.
        if refusal is not None:
            raise error_from_result(refusal)
        return answers

    def _answer(self, result: PGresult) -> Answer:
        if result.status == _COMMAND_OK:
            return Answer([], result.command_tuples or 0)
        self._transformer.set_pgresult(result)
        rows = self._transformer.load_rows(0, result.ntuples, tuple)
        return Answer(rows, len(rows))

    def _copy(self, sql: str, pieces: Iterable[bytes]) -> Generator[int, int, int]:
        pgconn = self._pgconn
        pgconn.send_query(sql.encode())
        yield from generators.send(pgconn)
        (copying,) = yield from generators.fetch_many(pgconn)
        if copying.status != _COPY_IN:
            raise error_from_result(copying)
        for piece in pieces:
            yield from generators.copy_to(pgconn, piece)
        ended = yield from generators.copy_end(pgconn, None)
        return ended.command_tuples or 0


class _Call(Generic[T]):
    """A call in progress. Its generator continues where a cancelled wait left it."""

    def __init__(self, socket: int, steps: Generator[int, int, T]) -> None:
        self.has_ended = False
        self._socket = socket
        self._steps = steps
        self._events: int | None = None

    async def wait(self) -> T:
        try:
            if self._events is None:
                self._events = next(self._steps)
            while True:
                ready = await _wait_for(self._socket, self._events)
                self._events = self._steps.send(ready)
        except StopIteration as end:
            self.has_ended = True
            result: T = end.value
            return result
        except Error:
            self.has_ended = True
            raise


async def _wait_for(socket: int, events: int) -> int:
    if events == _READ:
        await trio.lowlevel.wait_readable(socket)
        return _READ
    if events == _WRITE:
        await trio.lowlevel.wait_writable(socket)
        return _WRITE
    async with trio.open_nursery() as nursery:
        for wait in (trio.lowlevel.wait_readable, trio.lowlevel.wait_writable):
            nursery.start_soon(_then_cancel, wait, socket, nursery.cancel_scope)
    return _ready_now(socket, events) or _WRITE


async def _then_cancel(
    wait: Callable[[int], Awaitable[None]], socket: int, scope: trio.CancelScope
) -> None:
    await wait(socket)
    scope.cancel()


def _ready_now(socket: int, events: int) -> int:
    poll = select.poll()
    poll.register(
        socket,
        (select.POLLIN if events & _READ else 0) | (select.POLLOUT if events & _WRITE else 0),
    )
    ready = 0
    for _, event in poll.poll(0):
        if event & (select.POLLIN | select.POLLHUP | select.POLLERR):
            ready |= _READ
        if event & select.POLLOUT:
            ready |= _WRITE
    return ready


def _encode(value: Param) -> bytes | None:
    """Returns the text form of a parameter."""
    match value:
        case None:
            return None
        case str():
            return _to_bytes(value)
        case bool():
            return b"t" if value else b"f"
        case int() | float():
            return repr(value).encode()
        case _:
            return _to_bytes("{" + ",".join(map(_element, value)) + "}")


def _to_bytes(text: str) -> bytes:
    # PostgreSQL stores neither NUL characters nor lone surrogates. Only texts of third parties,
    # such as a site's content type, can have them.
    return text.replace("\0", "\ufffd").encode("utf-8", "replace")


def _element(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    if isinstance(value, bool):
        return "t" if value else "f"
    return repr(value)


def copy_pieces(rows: Iterable[Sequence[Any]]) -> Iterator[bytes]:
    """Encodes rows for COPY, as many as there may be."""
    lines: list[str] = []
    size = 0
    for row in rows:
        line = "\t".join(map(_copy_value, row))
        lines.append(line)
        size += len(line)
        if size >= _COPY_BYTES:
            yield _to_bytes("\n".join(lines) + "\n")
            lines, size = [], 0
    if lines:
        yield _to_bytes("\n".join(lines) + "\n")


def copy_columns(columns: Sequence[Sequence[Any]]) -> Iterator[bytes]:
    """Encodes rows for COPY that are given as columns.

    Most columns of new tasks have one value in all rows, which is encoded once. A task costs 0.8 us
    so, instead of 3.4 us with `copy_pieces`.
    """
    texts: list[Iterable[str]] = []
    for is_constant, group in groupby(columns, key=is_uniform):
        if is_constant:
            texts.append(repeat("\t".join(_copy_value(column[0]) for column in group)))
        else:
            texts += [map(_copy_value, column) for column in group]
    # The repeated texts never end, and there may be no others.
    lines = islice(map("\t".join, zip(*texts, strict=False)), len(columns[0]))
    # The server reads the first rows while the next ones are encoded.
    while piece := list(islice(lines, _COPY_ROWS)):
        yield _to_bytes("\n".join(piece) + "\n")


def is_uniform(column: Sequence[Any]) -> bool:
    """Whether all values of a column are the same."""
    return column.count(column[0]) == len(column)


_COPY_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})


def _copy_value(value: Any) -> str:
    if value is None:
        return "\\N"
    if isinstance(value, str):
        return value.translate(_COPY_ESCAPES) if "\\" in value or not value.isprintable() else value
    if isinstance(value, bool):
        return "t" if value else "f"
    return repr(value)


async def connect(url: str, *, options: str, prepares: bool, password: str | None) -> Connection:
    """Opens a connection with these session settings. Raises OperationalError and OSError."""
    params = params_of(url)
    params.setdefault("application_name", "conveyor")
    if password is not None:
        params["password"] = password
    if options:
        params["options"] = f"{params.get('options') or ''} {options}".strip()
    await _resolve(params)
    steps = generators.connect(make_conninfo("", **params))
    try:
        socket, events = next(steps)
        while True:
            socket, events = steps.send(await _wait_for(socket, events))
    except StopIteration as end:
        return Connection(end.value, prepares=prepares)


def params_of(url: str) -> dict[str, Any]:
    """Raises BadDatabaseUrl."""
    try:
        return dict(conninfo_to_dict(url))
    except ProgrammingError as error:
        raise BadDatabaseUrl(str(error).strip()) from None


async def _resolve(params: dict[str, Any]) -> None:
    """Resolves the names of hosts, because libpq would block the event loop meanwhile."""
    if params.get("hostaddr") or not params.get("host"):
        return
    addresses = []
    for host in str(params["host"]).split(","):
        if host.startswith(("/", "@")):  # A directory of Unix sockets.
            return
        try:
            resolved = await trio.socket.getaddrinfo(host, None, type=trio.socket.SOCK_STREAM)
        except OSError as error:
            raise OSError(f"no address of the host {host}: {error.strerror}") from error
        addresses.append(str(resolved[0][4][0]))
    params["hostaddr"] = ",".join(addresses)
