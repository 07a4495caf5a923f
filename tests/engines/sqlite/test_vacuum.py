"""The database file shrinks: in steps, or at once if an earlier release created it."""

from __future__ import annotations

import _sqlite3
import ctypes
import sqlite3
from pathlib import Path
from random import Random

from conveyor.engines.executor import ThreadExecutor
from conveyor.engines.sqlite import open_engine
from conveyor.engines.sqlite.disk_space import Space, rewrite_once
from tests.builders import JOB, ManualClock, a_job, a_run, a_task, keep


async def test_the_file_shrinks_after_rows_were_removed(data_dir: Path, clock: ManualClock) -> None:
    async with open_engine(data_dir, clock=clock, random=Random(1), owner="test") as engine:
        tasks = [a_task(n, metadata={"text": "x" * 40_000}) for n in range(100)]
        await keep(engine.store, a_job(), a_run(), *tasks)
        await engine.store.delete_run_rows(JOB, None, limit=5000)
        full_bytes = _size_bytes(data_dir)

        await engine.store.delete_expired(clock.now())

        assert full_bytes > 4_000_000
        assert _size_bytes(data_dir) < 2_000_000


async def test_the_log_of_an_idle_database_is_truncated(data_dir: Path, clock: ManualClock) -> None:
    async with open_engine(data_dir, clock=clock, random=Random(1), owner="test") as engine:
        tasks = [a_task(n, metadata={"text": "x" * 40_000}) for n in range(30)]
        await keep(engine.store, a_job(), a_run(), *tasks)
        await engine.store.delete_expired(clock.now())
        log_bytes = (data_dir / "conveyor.db-wal").stat().st_size

        clock.advance(20)
        await engine.store.delete_expired(clock.now())

        assert log_bytes > 1_000_000
        assert (data_dir / "conveyor.db-wal").stat().st_size == 0


async def test_the_page_caches_are_emptied_once_a_minute(
    data_dir: Path, clock: ManualClock
) -> None:
    async with open_engine(data_dir, clock=clock, random=Random(1), owner="test") as engine:
        tasks = [a_task(n, metadata={"text": "x" * 40_000}) for n in range(200)]
        await keep(engine.store, a_job(), a_run(), *tasks)
        held_bytes = _held_by_sqlite()

        for number in range(6):
            await keep(engine.store, a_task(300 + number))
            clock.advance(20)
            await engine.store.delete_expired(clock.now())

        assert held_bytes - _held_by_sqlite() > 6_000_000


def test_a_file_of_an_earlier_release_is_rewritten_if_a_quarter_is_free(tmp_path: Path) -> None:
    connection = _older_file(tmp_path, removed_share=0.5)
    pages_before = connection.execute("PRAGMA page_count").fetchone()[0]

    rewrite_once(connection, Space(tmp_path, ThreadExecutor()))

    assert connection.execute("PRAGMA page_count").fetchone()[0] < 0.6 * pages_before
    assert connection.execute("PRAGMA auto_vacuum").fetchone() == (2,)
    connection.close()


def test_a_file_of_an_earlier_release_that_is_in_use_is_not_rewritten(tmp_path: Path) -> None:
    connection = _older_file(tmp_path, removed_share=0.1)

    rewrite_once(connection, Space(tmp_path, ThreadExecutor()))

    assert connection.execute("PRAGMA auto_vacuum").fetchone() == (0,)
    connection.close()


def _held_by_sqlite() -> int:
    library = ctypes.CDLL(_sqlite3.__file__)
    library.sqlite3_memory_used.restype = ctypes.c_longlong
    return int(library.sqlite3_memory_used())


def _size_bytes(data_dir: Path) -> int:
    return sum((data_dir / name).stat().st_size for name in ("conveyor.db", "conveyor.db-wal"))


def _older_file(folder: Path, *, removed_share: float) -> sqlite3.Connection:
    connection = sqlite3.connect(folder / "older.db", isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE texts (number INTEGER PRIMARY KEY, text TEXT) STRICT")
    rows = [(number, "x" * 5000) for number in range(200)]
    connection.execute("BEGIN")
    connection.executemany("INSERT INTO texts VALUES (?, ?)", rows)
    connection.execute("COMMIT")
    connection.execute("DELETE FROM texts WHERE number < ?", (200 * removed_share,))
    return connection
