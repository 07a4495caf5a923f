"""Group commit: waiting writes are committed together, and an error of one does not affect the
others."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

import outcome
import pytest
import trio
import trio.testing

from conveyor.engines.executor import ThreadExecutor
from conveyor.engines.sqlite.errors import raise_translated, raise_translated_os
from conveyor.engines.sqlite.transactions import Op, TransactionCommitter
from conveyor.ports.errors import StorageFull, Unavailable

T = TypeVar("T")


@pytest.fixture
async def connection(tmp_path: Path) -> AsyncIterator[sqlite3.Connection]:
    connection = sqlite3.connect(
        tmp_path / "test.db", isolation_level=None, check_same_thread=False
    )
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA busy_timeout = 0")
    connection.execute("CREATE TABLE numbers (number INTEGER PRIMARY KEY) STRICT")
    yield connection
    connection.close()


@pytest.fixture
async def writer(connection: sqlite3.Connection) -> TransactionCommitter:
    return TransactionCommitter(connection)


def _adding(number: int) -> Op[int]:
    def op(connection: sqlite3.Connection) -> int:
        connection.execute("INSERT INTO numbers VALUES (?)", (number,))
        return number

    return op


def _numbers(connection: sqlite3.Connection) -> list[int]:
    return [number for (number,) in connection.execute("SELECT number FROM numbers ORDER BY 1")]


async def test_writes_that_wait_at_the_same_time_share_a_commit(
    writer: TransactionCommitter, connection: sqlite3.Connection
) -> None:
    async with trio.open_nursery() as nursery:
        for number in range(50):
            nursery.start_soon(writer.write, _adding(number))

    assert writer.commit_count == 1
    assert _numbers(connection) == [*range(50)]


async def test_each_write_returns_its_own_result(writer: TransactionCommitter) -> None:
    answers = {}

    async def write(number: int) -> None:
        answers[number] = await writer.write(_adding(number))

    async with trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(write, number)

    assert answers == {number: number for number in range(10)}


async def test_only_the_failing_write_of_a_group_fails(
    writer: TransactionCommitter, connection: sqlite3.Connection
) -> None:
    failed = []

    async def write(number: int) -> None:
        try:
            await writer.write(_adding(number))
        except sqlite3.IntegrityError:
            failed.append(number)

    async with trio.open_nursery() as nursery:
        for number in (1, 2, 2, 3):
            nursery.start_soon(write, number)

    assert failed == [2]
    assert _numbers(connection) == [1, 2, 3]


async def test_the_committer_continues_after_a_write_that_failed(
    writer: TransactionCommitter, connection: sqlite3.Connection
) -> None:
    def mistake(connection: sqlite3.Connection) -> None:
        _adding(1)(connection)
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        await writer.write(mistake)

    await writer.write(_adding(2))
    assert _numbers(connection) == [2]


async def test_only_the_culprit_fails_when_the_commit_fails(
    writer: TransactionCommitter, connection: sqlite3.Connection
) -> None:
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute(
        "CREATE TABLE pairs (number INTEGER REFERENCES numbers DEFERRABLE INITIALLY DEFERRED)"
    )

    def dangling(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO pairs VALUES (99)")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.write, _adding(1))
        nursery.start_soon(writer.write, _adding(2))
        with pytest.raises(sqlite3.IntegrityError):
            await writer.write(dangling)

    assert _numbers(connection) == [1, 2]
    assert connection.execute("SELECT count(*) FROM pairs").fetchone() == (0,)


async def test_a_cancelled_write_returns_promptly_and_does_not_affect_the_others(
    writer: TransactionCommitter, connection: sqlite3.Connection
) -> None:
    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            nursery.start_soon(writer.write, _adding(1))
            scope.cancel()
            await writer.write(_adding(2))

    assert scope.cancelled_caught
    assert 1 in _numbers(connection)


async def test_a_group_waits_for_the_lock_of_another_process_without_blocking_it(
    writer: TransactionCommitter, connection: sqlite3.Connection, tmp_path: Path
) -> None:
    other = sqlite3.connect(tmp_path / "test.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.write, _adding(1))
        await trio.testing.wait_all_tasks_blocked()
        other.execute("INSERT INTO numbers VALUES (7)")
        other.execute("COMMIT")

    assert _numbers(connection) == [1, 7]
    other.close()


async def test_a_full_disk_raises_storage_full(
    writer: TransactionCommitter, connection: sqlite3.Connection
) -> None:
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")

    def fill(connection: sqlite3.Connection) -> None:
        connection.executemany("INSERT INTO numbers VALUES (?)", [(n,) for n in range(10_000)])

    with pytest.raises(StorageFull) as refused:
        await writer.write(fill)

    assert isinstance(refused.value.__cause__, sqlite3.OperationalError)
    await writer.write(_adding(1))
    assert _numbers(connection) == [1]


@pytest.mark.parametrize(
    "code",
    [
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_IOERR_FSYNC,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_BUSY_SNAPSHOT,
    ],
)
def test_an_operational_error_raises_unavailable(code: int) -> None:
    error = sqlite3.OperationalError("x")
    error.sqlite_errorcode = code

    with pytest.raises(Unavailable) as refused:
        raise_translated(error)

    assert not isinstance(refused.value, StorageFull)
    assert refused.value.__cause__ is error


def test_a_programming_error_is_raised_unchanged() -> None:
    error = sqlite3.ProgrammingError("x")

    with pytest.raises(sqlite3.ProgrammingError):
        raise_translated(error)


def test_a_file_that_cannot_be_created_for_lack_of_space_raises_storage_full() -> None:
    with pytest.raises(StorageFull):
        raise_translated_os(OSError(28, "No space left on device"))
    with pytest.raises(Unavailable):
        raise_translated_os(OSError(5, "Input/output error"))


async def test_a_write_after_an_early_write_is_in_the_same_transaction(
    writer: TransactionCommitter, connection: sqlite3.Connection
) -> None:
    answer = await writer.write_early(_adding(1))
    is_open = connection.in_transaction
    await writer.write(_adding(2))

    assert (answer, is_open) == (1, True)
    assert writer.commit_count == 1
    assert _numbers(connection) == [1, 2]


async def test_an_early_write_without_a_later_one_is_committed(
    writer: TransactionCommitter, connection: sqlite3.Connection
) -> None:
    await writer.write_early(_adding(1))
    await writer.write(lambda _: None)

    assert not connection.in_transaction
    assert _numbers(connection) == [1]


async def test_a_failed_write_rolls_back_the_early_writes_of_its_transaction_only(
    writer: TransactionCommitter, connection: sqlite3.Connection
) -> None:
    await writer.write(_adding(1))

    await writer.write_early(_adding(2))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.write, _adding(3))
        with pytest.raises(sqlite3.IntegrityError):
            await writer.write(_adding(1))

    assert _numbers(connection) == [1, 3]


async def test_an_early_write_that_fails_raises_its_error(writer: TransactionCommitter) -> None:
    await writer.write(_adding(1))

    with pytest.raises(sqlite3.IntegrityError):
        await writer.write_early(_adding(1))


async def test_a_batched_write_is_committed_with_the_next_write(
    writer: TransactionCommitter, connection: sqlite3.Connection
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.write_batched, _adding(1))
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(writer.write, _adding(2))

    assert writer.commit_count == 1
    assert _numbers(connection) == [1, 2]


async def test_a_batched_write_is_committed_although_no_other_follows(
    writer: TransactionCommitter, connection: sqlite3.Connection
) -> None:
    await writer.write_batched(_adding(1))

    assert _numbers(connection) == [1]


class HeldCommits(ThreadExecutor):
    """An executor whose commits wait until the test lets them continue."""

    def __init__(self) -> None:
        self.begun = trio.Event()
        self.go_on = threading.Event()

    def start(self, work: Callable[[], T], then: Callable[[outcome.Outcome[T]], object]) -> None:
        self.begun.set()

        def held() -> T:
            self.go_on.wait(10)
            return work()

        super().start(held, then)


@pytest.mark.parametrize("way", ["write", "write_batched", "write_early"])
async def test_a_write_during_a_commit_is_committed_although_no_other_follows(
    connection: sqlite3.Connection, tmp_path: Path, way: str
) -> None:
    executor = HeldCommits()
    writer = TransactionCommitter(connection, executor)
    other = sqlite3.connect(tmp_path / "test.db")

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.write, _adding(1))
            await executor.begun.wait()
            nursery.start_soon(getattr(writer, way), _adding(2))
            await trio.testing.wait_all_tasks_blocked()
            executor.go_on.set()
        # An early write returns before its commit.
        while _numbers(other) != [1, 2]:
            await trio.sleep(0.001)

    assert _numbers(other) == [1, 2]
    other.close()


async def test_writes_raise_unavailable_if_no_thread_can_be_started(
    connection: sqlite3.Connection,
) -> None:
    class NoThreads(ThreadExecutor):
        is_out = True

        def start(
            self, work: Callable[[], T], then: Callable[[outcome.Outcome[T]], object]
        ) -> None:
            if self.is_out:
                raise RuntimeError("can't start new thread")
            super().start(work, then)

    executor = NoThreads()
    writer = TransactionCommitter(connection, executor)
    failed = []

    async def write(number: int) -> None:
        try:
            await writer.write(_adding(number))
        except Unavailable:
            failed.append(number)

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            for number in (1, 2):
                nursery.start_soon(write, number)
    executor.is_out = False
    await writer.write(_adding(3))

    assert sorted(failed) == [1, 2]
    assert _numbers(connection) == [3]
