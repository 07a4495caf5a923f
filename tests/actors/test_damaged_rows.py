"""A stored row that cannot be decoded: its task fails, and no other row is affected."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from conveyor.domain.changes import AnyKey, ExportKey, NoticeKey, RunKey, TaskKey
from conveyor.domain.export_record import ExportFormat, ExportStatus
from conveyor.domain.model import Task, TaskStatus, Webhook
from conveyor.domain.queries import NoticesOf
from conveyor.engines.aws.dynamodb import DynamoStore
from conveyor.engines.aws.dynamodb.items import key_item
from conveyor.engines.aws.dynamodb.keys import item_key
from conveyor.engines.sqlite import open_engine
from conveyor.engines.sqlite.sql import TABLES
from conveyor.engines.sqlite.store import SqliteStore
from conveyor.engines.system import VirtualClock
from conveyor.ports.store import Store
from conveyor.simulation.faults.faults import Faults
from conveyor.simulation.models import AwsModel, FaultSource
from conveyor.simulation.virtual_executor import VirtualExecutor
from conveyor.usecases import export
from conveyor.usecases.run import audit
from conveyor.usecases.submit.jobs import Accepted
from tests.actors.world import CALLER, World, make_world, urls
from tests.aws import a_modelled_engine
from tests.builders import ServerClock
from tests.conformance.engines import NAMES, Engine

NOT_JSON, NO_MEMBER, NO_TEXT = '{"a":', "mislaid", b"\xff\xfe{"

Open = Callable[[Path], Any]


@asynccontextmanager
async def _embedded(data_dir: Path) -> AsyncIterator[Engine]:
    executor = VirtualExecutor(Faults({}, Random(1)), Random(1))
    clock = VirtualClock(1_700_000_000.0)
    async with open_engine(
        data_dir, clock=clock, random=Random(1), owner="tests", executor=executor
    ) as engine:
        yield engine


@asynccontextmanager
async def _aws(data_dir: Path) -> AsyncIterator[Engine]:
    clock = VirtualClock(1_700_000_000.0)
    model = AwsModel(clock=ServerClock(clock), fault_source=FaultSource(random=Random(1)))
    yield cast("Engine", await a_modelled_engine(model, NAMES, clock=clock, random=Random(1)))


ENGINES: dict[str, Open] = {"embedded": _embedded, "aws": _aws}


@pytest.fixture(params=sorted(ENGINES))
async def world(
    request: pytest.FixtureRequest, tmp_path: Path, autojump_clock: MockClock
) -> AsyncGenerator[World, None]:
    async with ENGINES[request.param](tmp_path) as engine:
        base = make_world()
        env = replace(
            base.env,
            store=engine.store,
            queue=engine.queue,
            blobs=engine.blobs,
            coordinator=engine.coordinator,
        )
        yield replace(base, env=env)


async def spoil(store: Store, key: AnyKey, **fields: str | bytes) -> None:
    """Overwrites stored fields directly in the store."""
    if isinstance(store, SqliteStore):
        table = TABLES[type(key)]
        sets = ", ".join(f'"{name}" = CAST(? AS TEXT)' for name in fields)
        where = " AND ".join(f"{name} = ?" for name in table.key_columns)
        sql = f"UPDATE {table.name} SET {sets} WHERE {where}"
        parameters = [*fields.values(), *table.address(key)]
        count = await store._database.write(lambda db: db.execute(sql, parameters).rowcount)
        assert count == 1
    else:
        assert isinstance(store, DynamoStore)
        texts = {name: as_text(value) for name, value in fields.items()}
        params = {
            "TableName": NAMES.table,
            "Key": key_item(item_key(key)),
            "UpdateExpression": "SET " + ", ".join(f"#{name} = :{name}" for name in fields),
            "ExpressionAttributeNames": {f"#{name}": name for name in fields},
            "ExpressionAttributeValues": {f":{name}": {"S": text} for name, text in texts.items()},
        }
        await store._table.call("UpdateItem", params)


def as_text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode(errors="replace")


def key_of(accepted: Accepted, task: Task) -> TaskKey:
    return TaskKey(accepted.job.job_id, accepted.run.run_id, task.task_id, task.shard)


def has_crashed_actor(caplog: pytest.LogCaptureFixture) -> bool:
    return any(record.getMessage().startswith("child ") for record in caplog.records)


@pytest.mark.parametrize(
    "fields",
    [
        {"params": NOT_JSON},
        {"metadata": NO_TEXT},
        {"status": NO_MEMBER},
        {"method": NO_MEMBER},
        {"history": '"not a list"', "url": NO_TEXT},
    ],
    ids="-".join,
)
async def test_a_damaged_task_fails_without_a_fetch_and_the_other_tasks_succeed(
    world: World, caplog: pytest.LogCaptureFixture, fields: dict[str, str | bytes]
) -> None:
    accepted = await world.submit(urls(40))
    other = await world.submit(urls(5, "other.example"))
    damaged = (await world.tasks(accepted))[7]
    await spoil(world.env.store, key_of(accepted, damaged), **fields)

    async with world.working():
        run, totals = await world.wait_for_end(accepted)
        _, others = await world.wait_for_end(other)

    assert (totals.successful, totals.failed, totals.done) == (39, 1, 40)
    assert (others.successful, others.failed) == (5, 0)
    assert world.gateway.calls.total() == 44
    assert damaged.url not in world.gateway.calls
    (failed,) = [row for row in await world.tasks(accepted) if row.status is TaskStatus.FAILED]
    assert failed.task_id == damaged.task_id
    assert failed.problem is not None
    assert failed.problem.code == "row_damaged"
    assert (await audit.audit(world.env, run)).differences == []
    assert not has_crashed_actor(caplog)


async def test_text_in_place_of_a_number_fails_only_its_own_task(world: World) -> None:
    if isinstance(world.env.store, SqliteStore):
        pytest.skip("columns of numbers hold nothing else")
    accepted = await world.submit(urls(10))
    damaged = (await world.tasks(accepted))[3]
    await spoil(world.env.store, key_of(accepted, damaged), claim="many", attempts="few")

    async with world.working():
        _, totals = await world.wait_for_end(accepted)

    assert (totals.successful, totals.failed) == (9, 1)


async def test_a_row_that_is_damaged_after_its_task_ended_is_shown_with_its_readable_fields(
    world: World,
) -> None:
    accepted = await world.submit(urls(5))
    async with world.working():
        await world.wait_for_end(accepted)
        before = (await world.tasks(accepted))[2]
        await spoil(world.env.store, key_of(accepted, before), metadata=NOT_JSON)
        await spoil(world.env.store, key_of(accepted, before), status=NO_MEMBER)

    rows = await world.tasks(accepted)

    assert len(rows) == 5
    assert (rows[2].status, rows[2].result) == (TaskStatus.SUCCESSFUL, before.result)
    assert rows[2].metadata is None


async def test_a_damaged_notice_does_not_delay_the_others(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    hooked = [
        await world.submit(urls(1), webhook=Webhook(f"https://{name}.example/")) for name in "abc"
    ]
    world.notifier.failures = 3
    async with world.working():
        for accepted in hooked:
            await world.wait_for_end(accepted)
        with trio.fail_after(60):
            while len(world.notifier.tried) < 3:
                await trio.sleep(0.1)
        bad = hooked[0]
        query = NoticesOf(job_id=bad.job.job_id, run_id=bad.run.run_id, limit=1)
        (notice,) = await world.env.store.find(query)
        await spoil(world.env.store, NoticeKey(notice.notice_id), tries=NOT_JSON)
        with trio.fail_after(120):
            while len(world.notifier.tried) < 5:
                await trio.sleep(0.1)
        await trio.sleep(5)

    tried = [message.webhook.url for message in world.notifier.tried]
    assert [tried.count(f"https://{name}.example/") for name in "abc"] == [1, 2, 2]
    assert not has_crashed_actor(caplog)
    records = [record for record in caplog.records if "damaged row skipped" in record.getMessage()]
    assert [record.levelno for record in records] == [logging.ERROR]


async def test_a_damaged_run_does_not_hide_other_runs(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    accepted = [await world.submit(urls(3, f"{name}.example")) for name in "abc"]
    runs = sorted(accepted, key=lambda submitted: submitted.run.run_id)
    key = RunKey(runs[0].job.job_id, runs[0].run.run_id)
    await spoil(world.env.store, key, source_run_ids=NOT_JSON)

    async with world.working():
        for run in runs[1:]:
            await world.wait_for_end(run)

    assert not has_crashed_actor(caplog)


async def test_a_damaged_export_does_not_hold_up_another(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    accepted = await world.submit(urls(3))
    job_id, run_id = accepted.job.job_id, accepted.run.run_id
    async with world.working():
        await world.wait_for_end(accepted)

    bad, good = [
        await export.start(
            world.env, CALLER, job_id, run_id, ExportFormat.CSV, export_id=world.env.new_id()
        )
        for _ in range(2)
    ]
    await spoil(world.env.store, ExportKey(job_id, run_id, bad.export_id), format=NO_MEMBER)
    async with world.working():
        with trio.fail_after(60):
            status = good.status
            while status is not ExportStatus.COMPLETED:
                await trio.sleep(0.1)
                seen = await export.own_export(world.env, CALLER, job_id, run_id, good.export_id)
                status = seen.status

    assert not has_crashed_actor(caplog)
