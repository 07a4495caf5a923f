"""Opening a data directory: the lock of its owner, the schema version, and file modes."""

from __future__ import annotations

import os
import sqlite3
import stat
from pathlib import Path
from random import Random

import pytest

from conveyor.engines.sqlite import DataDirInUse, WrongSchema, join_engine, open_engine
from conveyor.engines.sqlite.database import load_scripts, migrate, version_of
from conveyor.engines.sqlite.errors import DataDirUnusable
from tests.builders import ManualClock, a_job, keep, key_of


async def test_a_second_owner_is_refused_with_the_name_of_the_first(
    data_dir: Path, clock: ManualClock
) -> None:
    async with open_engine(data_dir, clock=clock, random=Random(1), owner="dev"):
        with pytest.raises(DataDirInUse, match=rf"dev, process {os.getpid()}") as refused:
            async with open_engine(data_dir, clock=clock, random=Random(2), owner="scrape"):
                pass

        assert refused.value.pid == os.getpid()


async def test_a_directory_whose_owner_has_ended_can_be_owned_again(
    data_dir: Path, clock: ManualClock
) -> None:
    async with open_engine(data_dir, clock=clock, random=Random(1), owner="dev") as engine:
        await keep(engine.store, a_job())

    async with open_engine(data_dir, clock=clock, random=Random(1), owner="dev") as engine:
        assert await engine.store.read(key_of(a_job())) == a_job()


async def test_only_the_user_can_read_the_directory(data_dir: Path, clock: ManualClock) -> None:
    async with open_engine(data_dir, clock=clock, random=Random(1), owner="dev"):
        assert stat.S_IMODE(data_dir.stat().st_mode) == 0o700


async def test_the_schema_version_is_recorded(data_dir: Path, clock: ManualClock) -> None:
    async with open_engine(data_dir, clock=clock, random=Random(1), owner="dev"):
        pass

    assert version_of(sqlite3.connect(data_dir / "conveyor.db")) == max(load_scripts())


async def test_a_database_of_a_newer_release_is_refused(data_dir: Path, clock: ManualClock) -> None:
    data_dir.mkdir()
    newer = sqlite3.connect(data_dir / "conveyor.db")
    newer.execute(f"PRAGMA user_version = {max(load_scripts()) + 1}")
    newer.close()

    with pytest.raises(WrongSchema, match="newer release"):
        async with open_engine(data_dir, clock=clock, random=Random(1), owner="dev"):
            pass


def test_migrating_again_changes_nothing() -> None:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    migrate(connection)

    migrate(connection)

    assert version_of(connection) == max(load_scripts())


async def test_no_process_can_join_before_an_owner_has_created_the_database(
    data_dir: Path, clock: ManualClock
) -> None:
    with pytest.raises(WrongSchema, match="start its owner first"):
        async with join_engine(data_dir, clock=clock, random=Random(1)):
            pass


async def test_a_file_that_is_no_database_raises_unavailable_and_is_not_changed(
    data_dir: Path, clock: ManualClock
) -> None:
    data_dir.mkdir()
    (data_dir / "conveyor.db").write_bytes(b"not a database, but somebody's file" * 100)

    with pytest.raises(DataDirUnusable, match=r"conveyor\.db cannot be used .*not a database"):
        async with open_engine(data_dir, clock=clock, random=Random(1), owner="dev"):
            pass

    assert (data_dir / "conveyor.db").read_bytes().startswith(b"not a database")
