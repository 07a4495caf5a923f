"""The pool: deadlines, cancellation, lost connections, and what a pooler takes away."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import outcome
import pytest
import trio
from psycopg.errors import DivisionByZero, Error

from conveyor.engines.postgres import database as pool
from conveyor.engines.postgres.connection import BEGIN, Statement, copy_columns, copy_pieces
from conveyor.engines.postgres.database import Database, DatabaseConfig, open_database
from conveyor.ports.errors import StorageFull, Unavailable
from conveyor.usecases.context import together
from tests.postgres import execute, record_trips

_PIDS = """
SELECT pid FROM pg_stat_activity
WHERE application_name = 'conveyor' AND pid <> pg_backend_pid()
"""


async def _pid(database: Database) -> int:
    return int((await database.read(Statement("SELECT pg_backend_pid()"))).rows[0][0])


async def test_values_come_back_as_they_were_sent(database: Database) -> None:
    values = ['a "quoted" \\ text', None, "", "{,}", "NULL", "ünïcode\u2028"]

    answer = await database.read(
        Statement(
            "SELECT $1::text, $2::bigint, $3::double precision, $4::boolean, v FROM "
            "unnest($5::text[]) AS v",
            ("it's", -7, 0.1, True, values),
        )
    )

    assert answer.rows == [("it's", -7, 0.1, True, value) for value in values]


async def test_copied_rows_come_back_as_they_were(database: Database) -> None:
    rows = [(number, f"line {number}\t\\N\r\n", None, "a\\b") for number in range(5_000)]

    assert await _copied(database, copy_pieces(rows)) == rows
    assert await _copied(database, copy_columns(list(zip(*rows, strict=True)))) == rows


async def test_rows_of_which_every_column_has_one_value_are_all_copied(database: Database) -> None:
    rows = [(1, "line", None, "")] * 3

    assert await _copied(database, copy_columns(list(zip(*rows, strict=True)))) == rows


async def _copied(database: Database, pieces: Iterable[bytes]) -> list[tuple[Any, ...]]:
    async with database.connection() as connection:
        table = "CREATE TEMP TABLE copied (n bigint, t text, x text, y text)"
        await connection.run([Statement(table)])
        count = await connection.copy("copied (n, t, x, y)", pieces)
        answers = await connection.run(
            [Statement("SELECT * FROM copied ORDER BY n"), Statement("DROP TABLE copied")]
        )

    assert count == answers[0].rows_count
    return answers[0].rows


async def test_a_refused_statement_undoes_those_before_it(database: Database) -> None:
    with pytest.raises(Error):
        await database.run(
            Statement("INSERT INTO queues (run_id) VALUES ('a')"), Statement("SELECT 1 / $1", (0,))
        )

    answer = await database.read(Statement("SELECT count(*) FROM queues"))
    assert answer.rows == [(0,)]


async def test_a_cancelled_caller_leaves_at_once_and_the_connection_is_used_again(
    database: Database,
) -> None:
    pid = await _pid(database)

    with trio.move_on_after(0.05) as scope:
        await database.read(Statement("SELECT pg_sleep(1)"))

    assert scope.cancelled_caught
    assert await _pid(database) != pid  # The first one is still busy.
    while await _pid(database) != pid:
        await trio.sleep(0.05)


async def test_an_abandoned_transaction_is_rolled_back(database: Database) -> None:
    with trio.CancelScope() as scope:
        async with database.connection() as connection:
            await connection.run(
                [BEGIN, Statement("INSERT INTO queues (run_id) VALUES ('abandoned')")]
            )
            scope.cancel()
            await trio.lowlevel.checkpoint()
            raise AssertionError("not cancelled")

    answer = await database.read(Statement("SELECT count(*) FROM queues"))
    assert answer.rows == [(0,)]


async def test_reads_survive_that_the_server_cut_every_connection(
    database: Database, url: str
) -> None:
    await _pid(database)

    await execute(url, f"SELECT pg_terminate_backend(pid) FROM ({_PIDS}) AS others")

    assert await _pid(database) > 0


async def test_reads_of_one_moment_share_a_round_trip(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    trips = record_trips(monkeypatch)

    answers = await together(*(partial(_number, database, number) for number in range(5)))

    assert answers == [0, 1, 2, 3, 4]
    assert trips == [5]


async def test_a_refused_read_fails_none_of_the_others(database: Database) -> None:
    refused = partial(database.read, Statement("SELECT 1 / 0"))

    with pytest.raises(DivisionByZero):
        await together(refused)
    results = await together(
        partial(_number, database, 1),
        partial(outcome.acapture, refused),
        partial(_number, database, 2),
    )

    assert (results[0], results[2]) == (1, 2)
    assert isinstance(results[1].error, DivisionByZero)


async def test_a_server_that_is_away_fails_every_read_of_the_moment() -> None:
    async with open_database(DatabaseConfig(url="postgresql://x@127.0.0.1:1/x")) as database:
        reads = [partial(outcome.acapture, partial(_number, database, n)) for n in range(3)]
        results = await together(*reads)

    assert [type(result.error) for result in results] == [Unavailable] * 3


async def test_a_caller_that_leaves_fails_no_read_of_the_others(database: Database) -> None:
    async def leave() -> None:
        with trio.move_on_after(0):
            await _number(database, 1)

    assert (await together(leave, partial(_number, database, 2)))[1] == 2


async def _number(database: Database, number: int) -> int:
    return int((await database.read(Statement("SELECT $1::bigint", (number,)))).rows[0][0])


async def test_a_write_on_a_connection_that_is_cut_is_of_unknown_outcome(
    database: Database, url: str
) -> None:
    async with trio.open_nursery() as nursery:

        async def write() -> None:
            with pytest.raises(Unavailable):
                await database.run(
                    Statement("INSERT INTO queues (run_id) VALUES ('cut')"),
                    Statement("SELECT pg_sleep(30)"),
                )

        nursery.start_soon(write)
        sleeping = f"{_PIDS} AND query LIKE '%pg_sleep(30)%'"
        while not await execute(url, sleeping):
            await trio.sleep(0.02)
        await execute(url, f"SELECT pg_terminate_backend(pid) FROM ({sleeping}) AS others")


async def test_a_statement_that_takes_too_long_is_unavailable(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Unavailable, match="statement timeout"):
        await database.run(
            Statement("SELECT set_config('statement_timeout', '20ms', true)"),
            Statement("SELECT pg_sleep(30)"),
        )


async def test_a_server_that_does_not_answer_is_unavailable_by_the_deadline(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "CALL_S", 0.05)

    with pytest.raises(Unavailable, match="in time"):
        await database.read(Statement("SELECT pg_sleep(1)"))


async def test_no_caller_waits_for_a_connection_forever(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "ACQUIRE_S", 0.05)
    config = DatabaseConfig(url=url, connections_max=1)

    async with open_database(config) as database, database.connection():
        with pytest.raises(Unavailable):
            await _pid(database)


async def test_a_full_disk_is_told_apart(database: Database) -> None:
    with pytest.raises(StorageFull):
        await database.run(
            Statement("DO $$ BEGIN RAISE EXCEPTION 'full' USING ERRCODE = '53100'; END $$")
        )


async def test_an_unreachable_server_is_unavailable() -> None:
    config = DatabaseConfig(url="postgresql://conveyor@127.0.0.1:1/postgres")

    async with open_database(config) as database:
        with pytest.raises(Unavailable):
            await _pid(database)


async def test_without_sessions_nothing_is_prepared(url: str) -> None:
    config = DatabaseConfig(url=url, has_sessions=False, connections_max=1)
    async with open_database(config) as database:
        await database.read(Statement("SELECT $1::bigint", (1,)))
        answer = await database.read(Statement("SELECT count(*) FROM pg_prepared_statements"))

    assert answer.rows == [(0,)]


async def test_the_number_of_prepared_statements_is_bounded(database: Database) -> None:
    async with database.connection() as connection:
        for number in range(450):
            await connection.run([Statement(f"SELECT $1::bigint + {number}", (1,))])
        (answer,) = await connection.run([Statement("SELECT count(*) FROM pg_prepared_statements")])

    assert answer.rows[0][0] <= 402
