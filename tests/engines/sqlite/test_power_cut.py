"""Data of an answered call survives a power cut, whichever way the body was stored."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from random import Random

import pytest
import trio

from conveyor.engines.executor import ThreadExecutor
from conveyor.engines.sqlite import EmbeddedEngine, open_engine
from conveyor.engines.sqlite.database import open_database
from conveyor.engines.sqlite.disk_space import Space
from conveyor.engines.system import AesSecretBox, check_secret, load_or_create_secret
from conveyor.ports.blobs import Stored
from tests.builders import ManualClock
from tests.engines.sqlite.power import Disk

BODY = b"body " * 1000
LARGE = b"large " * 250_000  # This is too large for a pack.


@pytest.fixture
def disk(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    data_dir.mkdir(mode=0o700)
    return Disk(data_dir, monkeypatch)


@pytest.fixture
async def engine(disk: Disk, data_dir: Path, clock: ManualClock) -> AsyncIterator[EmbeddedEngine]:
    async with open_engine(data_dir, clock=clock, random=Random(1), owner="test") as engine:
        yield engine


async def _pieces() -> AsyncIterator[bytes]:
    for at in range(0, len(LARGE), 100_000):
        yield LARGE[at : at + 100_000]


async def _put(engine: EmbeddedEngine) -> Stored:
    return await engine.blobs.put("jobs/j/deep/er/task/1", [BODY[:7], BODY[7:]])


async def _add(engine: EmbeddedEngine) -> Stored:
    return await engine.blobs.add("jobs/j/runs/r", "task.1", [BODY])


async def _add_large(engine: EmbeddedEngine) -> Stored:
    return await engine.blobs.add("jobs/j/runs/r", "task.1", [LARGE])


async def _add_to_an_open_pack(engine: EmbeddedEngine) -> Stored:
    await engine.blobs.add("jobs/j/runs/r", "task.0", [b"before"])
    return await engine.blobs.add("jobs/j/runs/r", "task.1", [BODY])


async def _stream(engine: EmbeddedEngine) -> Stored:
    return await engine.blobs.put_stream("inputs/i/list", _pieces())


async def _stream_of_nothing(engine: EmbeddedEngine) -> Stored:
    async def none() -> AsyncIterator[bytes]:
        for piece in list[bytes]():
            yield piece

    return await engine.blobs.put_stream("inputs/i/list", none())


async def _copy(engine: EmbeddedEngine) -> Stored:
    await engine.blobs.put_stream("inputs/i/list", _pieces())
    return await engine.blobs.copy("inputs/i/list", "sources/j/r/0")


async def _copy_over_another(engine: EmbeddedEngine) -> Stored:
    await engine.blobs.put("sources/j/r/0", [b"another"])
    return await _copy(engine)


async def _put_over_another(engine: EmbeddedEngine) -> Stored:
    await engine.blobs.put("jobs/j/deep/er/task/1", [b"another"])
    return await _put(engine)


WAYS = [
    _put,
    _put_over_another,
    _add,
    _add_to_an_open_pack,
    _add_large,
    _stream,
    _stream_of_nothing,
    _copy,
    _copy_over_another,
]


@pytest.mark.parametrize("store", WAYS)
async def test_a_stored_body_survives_a_power_cut(
    engine: EmbeddedEngine,
    disk: Disk,
    tmp_path: Path,
    clock: ManualClock,
    store: Callable[[EmbeddedEngine], Awaitable[Stored]],
) -> None:
    stored = await store(engine)

    disk.cut_power(tmp_path / "after")

    assert disk.torn == []
    async with open_engine(
        tmp_path / "after", clock=clock, random=Random(2), owner="test"
    ) as after:
        body = b"".join([piece async for piece in after.blobs.open(stored.key)])
    assert len(body) == stored.size_bytes
    assert body in (BODY, LARGE, b"")


async def test_each_of_many_concurrently_stored_bodies_survives(
    engine: EmbeddedEngine, disk: Disk, tmp_path: Path, clock: ManualClock
) -> None:
    bodies = {f"jobs/j{number % 3}/x/{number}/1": b"%d" % number for number in range(40)}
    added: dict[str, bytes] = {}

    async def add(number: int) -> None:
        body = b"added %d" % number
        stored = await engine.blobs.add(f"jobs/j{number % 3}/runs/r", f"task.{number}", [body])
        added[stored.key] = body

    async with trio.open_nursery() as nursery:
        for key, body in bodies.items():
            nursery.start_soon(engine.blobs.put, key, [body])
        for number in range(40):
            nursery.start_soon(add, number)
    disk.cut_power(tmp_path / "after")

    assert disk.torn == []
    async with open_engine(
        tmp_path / "after", clock=clock, random=Random(2), owner="test"
    ) as after:
        for key, body in {**bodies, **added}.items():
            assert b"".join([piece async for piece in after.blobs.open(key)]) == body


async def test_a_body_survives_in_a_directory_that_was_deleted_and_created_again(
    engine: EmbeddedEngine, disk: Disk, tmp_path: Path, clock: ManualClock
) -> None:
    await engine.blobs.put("jobs/j/x/1", [b"before"])
    await engine.blobs.add("jobs/j/runs/r", "task.0", [b"before"])
    await engine.blobs.delete_prefix("jobs/j")

    put = await engine.blobs.put("jobs/j/x/1", [BODY])
    added = await engine.blobs.add("jobs/j/runs/r", "task.1", [BODY])
    disk.cut_power(tmp_path / "after")

    async with open_engine(
        tmp_path / "after", clock=clock, random=Random(2), owner="test"
    ) as after:
        for key in (put.key, added.key):
            assert b"".join([piece async for piece in after.blobs.open(key)]) == BODY


def test_the_secret_and_its_check_survive_a_power_cut(
    disk: Disk, data_dir: Path, tmp_path: Path
) -> None:
    secret = load_or_create_secret(data_dir / "secret.key")
    check_secret(data_dir, AesSecretBox(secret))

    disk.cut_power(tmp_path / "after")

    assert disk.torn == []
    assert load_or_create_secret(tmp_path / "after" / "secret.key") == secret
    assert (tmp_path / "after" / "secret.check").read_bytes() == (
        data_dir / "secret.check"
    ).read_bytes()


async def test_sqlite_syncs_what_is_committed(tmp_path: Path) -> None:
    """FULL means that every commit syncs the log and every checkpoint the file."""

    def settings(connection: sqlite3.Connection) -> list[object]:
        pragmas = ("journal_mode", "synchronous")
        return [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in pragmas]

    space = Space(tmp_path, ThreadExecutor())
    async with open_database(
        tmp_path / "x.db", lambda _: None, ThreadExecutor(), space
    ) as database:
        assert await database.write(settings) == ["wal", 2]


def test_the_model_loses_unsynced_data(disk: Disk, data_dir: Path, tmp_path: Path) -> None:
    (data_dir / "kept").write_bytes(b"kept")
    disk.sync_all()
    (data_dir / "kept").write_bytes(b"changed")
    (data_dir / "lost").write_bytes(b"lost")

    disk.cut_power(tmp_path / "after")

    assert {path.name: path.read_bytes() for path in (tmp_path / "after").iterdir()} == {
        "kept": b"kept"
    }
