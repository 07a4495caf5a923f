"""A damaged database is logged once and distinguished from one that is temporarily unavailable."""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path
from random import Random

import pytest

from conveyor.engines.sqlite import open_engine
from conveyor.engines.sqlite.database import Health
from conveyor.ports.errors import StorageDamaged
from tests.builders import ManualClock, a_job, a_run, a_task, keep, key_of


def _error(code: int) -> sqlite3.Error:
    error = sqlite3.DatabaseError("x")
    error.sqlite_errorcode = code
    return error


async def test_damage_found_by_a_read_is_logged_and_makes_the_engine_unsound(
    data_dir: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_engine(data_dir, clock=clock, random=Random(1), owner="test") as engine:
        tasks = [a_task(n, metadata={"text": "x" * 8000}) for n in range(500)]
        await keep(engine.store, a_job(), a_run(), *tasks)
    path = data_dir / "conveyor.db"
    async with open_engine(data_dir, clock=clock, random=Random(1), owner="test") as engine:
        was_sound = engine.health.is_sound()
        with path.open("r+b") as file:
            file.seek(200_000)
            file.write(b"\xff" * (path.stat().st_size - 400_000))

        for task in tasks[250:253]:
            with pytest.raises(StorageDamaged):
                await engine.store.read(key_of(task))

        assert (was_sound, engine.health.is_sound()) == (True, False)
        errors = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert [record.message.partition(":")[0] for record in errors] == [
            "the database is damaged"
        ]
        assert vars(errors[0])["path"] == str(path)


def test_a_successful_commit_clears_an_io_error_but_not_damage(tmp_path: Path) -> None:
    damaged, failing = Health(tmp_path), Health(tmp_path)

    damaged.note(_error(sqlite3.SQLITE_CORRUPT))
    failing.note(_error(sqlite3.SQLITE_IOERR_WRITE))
    before = damaged.is_sound(), failing.is_sound()
    damaged.note_commit()
    failing.note_commit()

    assert before == (False, False)
    assert (damaged.is_sound(), failing.is_sound()) == (False, True)


@pytest.mark.parametrize("code", [sqlite3.SQLITE_BUSY, sqlite3.SQLITE_FULL])
def test_a_temporary_error_is_not_damage(tmp_path: Path, code: int) -> None:
    health = Health(tmp_path)

    health.note(_error(code))

    assert health.is_sound()
