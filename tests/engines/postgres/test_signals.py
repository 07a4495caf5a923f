"""Signals between processes: each batch to one, each run to all, none lost for long."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio

from conveyor.domain.ids import JobId, RunId
from conveyor.engines.postgres import signals
from conveyor.engines.postgres.database import Database, DatabaseConfig, open_database
from conveyor.engines.postgres.signals import Notifier
from tests.builders import JOB, RUN
from tests.postgres import execute


class _Ears:
    def __init__(self, notifier: Notifier) -> None:
        self.notifier = notifier
        self.runs: list[RunId] = []
        self.batches: list[RunId] = []

    async def hear_run(self, job_id: JobId, run_id: RunId) -> None:
        self.runs.append(run_id)

    async def hear_batch(self, job_id: JobId, run_id: RunId) -> None:
        self.batches.append(run_id)

    async def listen(self) -> None:
        await self.notifier.listen_forever(self.hear_run, self.hear_batch)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await trio.sleep(0.01)


async def _listening(database: Database, count: int) -> None:
    async def listeners() -> int:
        sql = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%control_messages%'"
        rows = await execute(database._config.url, sql)
        return int(str(rows[0][0]))

    while await listeners() < count:
        await trio.sleep(0.01)


async def test_a_changed_run_is_told_to_all_and_a_batch_to_one(
    database: Database, url: str
) -> None:
    async with open_database(DatabaseConfig(url=url)) as other, trio.open_nursery() as nursery:
        ears = [_Ears(Notifier(database)), _Ears(Notifier(other))]
        for ear in ears:
            nursery.start_soon(ear.listen)
        notifier = Notifier(database)

        # A listener that is not there yet hears nothing, so say it until both have heard.
        while not all(ear.runs for ear in ears):
            await notifier.run_changed(JOB, RUN)
            await trio.sleep(0.02)
        await notifier.batch_opened(JOB, RUN)
        await _until(lambda: any(ear.batches for ear in ears))
        await trio.sleep(0.1)

        assert sum(len(ear.batches) for ear in ears) == 1
        nursery.cancel_scope.cancel()


async def test_a_batch_is_found_without_its_notification(
    database: Database, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "POLL_S", 0.05)
    ear = _Ears(Notifier(database))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ear.listen)
        await execute(url, f"INSERT INTO control_messages (job_id, run_id) VALUES ('{JOB}', 'r')")

        await _until(lambda: bool(ear.batches))
        nursery.cancel_scope.cancel()


async def test_a_listener_whose_connection_was_cut_listens_again(
    database: Database, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "_AGAIN_S", 0.01)
    ear = _Ears(Notifier(database))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ear.listen)
        while not ear.runs:
            await Notifier(database).run_changed(JOB, RUN)
            await trio.sleep(0.02)
        await execute(
            url,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'conveyor' AND pid <> pg_backend_pid()",
        )
        ear.runs.clear()

        while not ear.runs:
            await Notifier(database).run_changed(JOB, RUN)
            await trio.sleep(0.02)
        nursery.cancel_scope.cancel()


async def test_a_sender_without_a_server_only_logs(caplog: pytest.LogCaptureFixture) -> None:
    config = DatabaseConfig(url="postgresql://conveyor@127.0.0.1:1/postgres")

    async with open_database(config) as database:
        await Notifier(database).run_changed(JOB, RUN)

    assert "notification not sent" in caplog.text
