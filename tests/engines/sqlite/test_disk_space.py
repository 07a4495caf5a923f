"""Free space: what is refused on a full disk, what is not, and what works again afterwards.

The executor is wrapped so that it reports as much free space as the test sets; a test with a
volume that is really full is in tests/attack."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest

from conveyor.domain.changes import Change, Delete, Insert
from conveyor.engines.executor import ThreadExecutor, Volume
from conveyor.engines.sqlite import EmbeddedEngine, open_engine
from conveyor.engines.sqlite.disk_space import FLOOR_BYTES_MAX, RESERVE_BYTES_MAX, Space
from conveyor.engines.sqlite.transactions import TransactionCommitter
from conveyor.ports.errors import StorageFull, Unavailable
from tests.builders import ManualClock, a_deletion_intent, a_job, keep, key_of

MIB = 1024 * 1024


class SmallVolume(ThreadExecutor):
    """An executor that reports this much free space on the volume."""

    free_bytes = 100 * MIB
    total_bytes = 160 * MIB

    def measure_volume(self, directory: str) -> Volume:
        return Volume(self.free_bytes, self.total_bytes)


@asynccontextmanager
async def _open(data_dir: Path, executor: SmallVolume) -> AsyncIterator[EmbeddedEngine]:
    async with open_engine(
        data_dir, clock=ManualClock(), random=Random(1), owner="test", executor=executor
    ) as engine:
        yield engine


async def test_below_the_minimum_no_job_and_no_fetch_is_started_but_a_paid_body_is_stored(
    data_dir: Path,
) -> None:
    executor = SmallVolume()
    async with _open(data_dir, executor) as engine:
        executor.free_bytes = 15 * MIB

        with pytest.raises(StorageFull):
            await keep(engine.store, a_job())
        with pytest.raises(StorageFull):
            engine.blobs.check_room()
        await engine.blobs.add("jobs/j/runs/r", "task.1", [b"body"])


async def test_below_half_of_the_minimum_no_body_is_stored(data_dir: Path) -> None:
    executor = SmallVolume()
    async with _open(data_dir, executor) as engine:
        executor.free_bytes = 9 * MIB

        async def pieces() -> AsyncIterator[bytes]:
            yield b"body"

        with pytest.raises(StorageFull):
            await engine.blobs.add("jobs/j/runs/r", "task.1", [b"body"])
        with pytest.raises(StorageFull):
            await engine.blobs.put("jobs/j/a/b", [b"body"])
        with pytest.raises(StorageFull):
            await engine.blobs.put_stream("jobs/j/a/c", pieces())
        assert list((data_dir / "temp").iterdir()) == []


async def test_deletes_and_reads_are_not_refused_below_the_minimum(data_dir: Path) -> None:
    executor = SmallVolume()
    async with _open(data_dir, executor) as engine:
        await keep(engine.store, a_job())
        await engine.blobs.put("jobs/j/a/b", [b"body"])
        executor.free_bytes = 0

        intent = Insert(key_of(a_deletion_intent()), a_deletion_intent())
        await engine.store.commit((Change((intent, Delete(key_of(a_job())))),))

        assert await engine.store.read(key_of(a_job())) is None
        assert await engine.blobs.delete_prefix("jobs/j") == 1


async def test_a_refused_job_is_accepted_once_there_is_free_space(data_dir: Path) -> None:
    executor = SmallVolume()
    async with _open(data_dir, executor) as engine:
        executor.free_bytes = 0
        with pytest.raises(StorageFull):
            engine.blobs.check_room()

        executor.free_bytes = 100 * MIB

        engine.blobs.check_room()
        await keep(engine.store, a_job())


async def test_a_missing_volume_raises_unavailable(data_dir: Path) -> None:
    async with _open(data_dir, SmallVolume()):
        pass
    space = Space(data_dir, ThreadExecutor())
    (data_dir / "blobs").rename(data_dir / "elsewhere")

    with pytest.raises(Unavailable, match="No such file"):
        space.check_fetch()


@pytest.mark.parametrize(
    ("total_bytes", "reserve_bytes"), [(96 * MIB, 6 * MIB), (1 << 40, RESERVE_BYTES_MAX)]
)
def test_the_reserve_file_occupies_its_space_on_the_volume(
    tmp_path: Path, total_bytes: int, reserve_bytes: int
) -> None:
    executor = SmallVolume()
    executor.total_bytes, executor.free_bytes = total_bytes, total_bytes // 2
    space = Space(tmp_path, executor)

    assert space.restore()

    assert (tmp_path / "reserve").stat().st_blocks * 512 >= reserve_bytes


def test_the_reserve_file_is_created_again_only_if_enough_space_is_free(tmp_path: Path) -> None:
    executor = SmallVolume()
    space = Space(tmp_path, executor)
    space.restore()

    released = space.release(), space.release()
    executor.free_bytes = 20 * MIB
    too_early = space.restore()
    executor.free_bytes = 60 * MIB
    in_time = space.restore()

    assert released == (True, False)
    assert (too_early, in_time) == (False, True)


def test_opening_a_full_volume_deletes_the_reserve_file(tmp_path: Path) -> None:
    executor = SmallVolume()
    space = Space(tmp_path, executor)
    space.prepare()
    was_there = (tmp_path / "reserve").exists()

    executor.free_bytes = 0
    space.prepare()

    assert (was_there, (tmp_path / "reserve").exists()) == (True, False)


def test_the_minimum_of_free_space_on_a_large_volume_is_a_fixed_size(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    executor = SmallVolume()
    executor.total_bytes = 1 << 40
    space = Space(tmp_path, executor)

    executor.free_bytes = FLOOR_BYTES_MAX
    space.check_new()
    executor.free_bytes = FLOOR_BYTES_MAX - 1
    with pytest.raises(StorageFull, match="256 MiB"):
        space.check_new()


async def test_a_commit_on_a_full_disk_is_repeated_after_the_reserve_file_was_deleted(
    tmp_path: Path,
) -> None:
    connection = sqlite3.connect(
        tmp_path / "test.db", isolation_level=None, check_same_thread=False
    )
    connection.execute("CREATE TABLE texts (text TEXT) STRICT")
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")
    errors: list[BaseException] = []

    def make_room(error: BaseException) -> bool:
        errors.append(error)
        connection.execute("PRAGMA max_page_count = 1000")
        return True

    writer = TransactionCommitter(connection, on_error=make_room)
    await writer.write(lambda on: on.execute("INSERT INTO texts VALUES (?)", ("x" * 20_000,)))

    assert [str(error) for error in errors] == ["database or disk is full"]
    assert connection.execute("SELECT count(*) FROM texts").fetchone() == (1,)
    connection.close()


def test_an_empty_reserve_file_is_created_again(tmp_path: Path) -> None:
    (tmp_path / "reserve").touch()

    assert Space(tmp_path, SmallVolume()).restore()

    assert (tmp_path / "reserve").stat().st_blocks * 512 >= RESERVE_BYTES_MAX
