"""The sweeper's rounds: workers with one engine take turns."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from actors.messages import BatchStalled, StreamerMessage
from actors.reconcile_sweeper import ReconcileSweeper
from actors.runtime import Mailbox
from conveyor.domain.changes import Insert, JobKey
from conveyor.domain.lifecycle import RUN_LIVE_STORED
from conveyor.domain.model import RunStatus
from conveyor.domain.queries import BatchesIn, RunsIn
from conveyor.ports.errors import Unavailable
from conveyor.ports.store import Store
from conveyor.usecases.context import RuntimeConfig
from conveyor.usecases.run import runs
from conveyor.usecases.submit import jobs
from tests.actors.faults import has_crashed_actor
from tests.actors.world import CALLER, make_world, urls, without_signals
from tests.builders import a_batch, a_change, key_of


@dataclass(frozen=True, slots=True)
class CountingStore:
    """A store that counts the queries for all live runs."""

    inner: Store
    name: str
    looks: Counter[str] = field(default_factory=Counter)

    async def find(self, query: Any) -> Any:
        if isinstance(query, RunsIn) and query.statuses == RUN_LIVE_STORED:
            self.looks[self.name] += 1
        return await self.inner.find(query)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


async def test_five_workers_sweep_the_live_runs_about_as_often_as_one(
    autojump_clock: MockClock,
) -> None:
    world = make_world()
    looks: Counter[str] = Counter()
    mailbox: Mailbox[StreamerMessage] = Mailbox(capacity=10)

    async with trio.open_nursery() as nursery:
        for number in range(5):
            store = CountingStore(world.env.store, f"worker {number}", looks)
            env = replace(world.env, store=store)
            sweeper = ReconcileSweeper(env=env, streamer=mailbox.address, period_s=30.0)
            nursery.start_soon(sweeper.run)
            await trio.sleep(3.7)
        await trio.sleep(600)
        nursery.cancel_scope.cancel()

    assert 20 <= looks.total() <= 45


async def test_a_killed_sweeper_is_replaced_by_another_within_two_periods(
    autojump_clock: MockClock,
) -> None:
    world = make_world()
    looks: Counter[str] = Counter()
    mailbox: Mailbox[StreamerMessage] = Mailbox(capacity=10)

    def a_sweeper(name: str) -> ReconcileSweeper:
        env = replace(world.env, store=CountingStore(world.env.store, name, looks))
        return ReconcileSweeper(env=env, streamer=mailbox.address, period_s=30.0)

    with trio.move_on_after(1):
        await a_sweeper("first").run()
    with trio.move_on_after(60):
        await a_sweeper("second").run()

    assert looks["first"] == 1
    assert looks["second"] >= 1


@dataclass(slots=True)
class FailingStore:
    """A store that cannot find batches while it is unavailable."""

    inner: Store
    is_away: bool = False
    refused_count: int = 0

    async def find(self, query: Any) -> Any:
        if self.is_away and isinstance(query, BatchesIn):
            self.refused_count += 1
            raise Unavailable("away")
        return await self.inner.find(query)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


async def test_a_batch_written_by_a_clock_that_was_ahead_is_resumed_after_an_outage_of_the_store(
    autojump_clock: MockClock,
) -> None:
    world = make_world()
    store = FailingStore(world.env.store, is_away=True)
    env = replace(world.env, store=cast("Any", store))
    mailbox: Mailbox[StreamerMessage] = Mailbox(capacity=10)
    batch = a_batch(updated_at=env.now() + 86_400)
    await world.env.store.commit([a_change(Insert(key_of(batch), batch))])

    async with trio.open_nursery() as nursery:
        sweeper = ReconcileSweeper(env=env, streamer=mailbox.address, period_s=15.0)
        nursery.start_soon(sweeper.run)
        await trio.sleep(40)
        assert store.refused_count > 2
        store.is_away = False
        with trio.fail_after(60):
            message = await mailbox.open_inbox().receive()
        nursery.cancel_scope.cancel()

    assert message == BatchStalled(batch)


async def test_a_batch_without_an_ingester_is_resumed(
    autojump_clock: MockClock,
) -> None:
    world = without_signals(make_world(think_s=0))
    config = RuntimeConfig(sync_tasks_max=100)
    world = replace(world, env=replace(world.env, config=config))

    async with world.working():
        await trio.sleep(1)
        accepted = await world.submit(urls(2_500))
        assert accepted.is_later
        run, totals = await world.wait_for_end(accepted, within_s=120)

    assert totals.successful == run.total == 2_500


async def test_lost_messages_are_sent_again(autojump_clock: MockClock) -> None:
    world = make_world()
    accepted = await world.submit(urls(20))
    await world.env.queue.close_run(accepted.run.run_id)

    async with world.working():
        run, totals = await world.wait_for_end(accepted, within_s=120)

    assert (run.status, totals.successful) == (RunStatus.COMPLETED, 20)


async def test_a_deleted_job_leaves_neither_rows_nor_bodies(
    autojump_clock: MockClock,
) -> None:
    world = make_world()

    async with world.working():
        accepted = await world.submit(urls(200))
        await world.wait_for_end(accepted)
        await jobs.delete(world.env, CALLER, accepted.job.job_id)
        await trio.sleep(600)

    assert await world.tasks(accepted) == []
    assert await world.env.blobs.delete_prefix(f"jobs/{accepted.job.job_id}") == 0


async def test_a_run_that_crashes_the_sweeper_does_not_prevent_repairs_of_later_runs(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(think_s=5.0)
    checked: set[str] = set()
    complete = runs.complete_if_done

    async def crash_for_one(env: Any, job_id: Any, run_id: Any) -> bool:
        checked.add(run_id)
        if run_id == min(ids):
            raise AssertionError("more tasks are done than were admitted")
        return await complete(env, job_id, run_id)

    async with world.working():
        accepted = [await world.submit(urls(2)) for _ in range(3)]
        ids = [submitted.run.run_id for submitted in accepted]
        monkeypatch.setattr(runs, "complete_if_done", crash_for_one)
        await trio.sleep(60)

    assert checked == set(ids)
    assert not has_crashed_actor(caplog)
    assert await world.env.store.read(JobKey(accepted[0].job.job_id)) is not None
    assert [record for record in caplog.records if record.levelno >= logging.ERROR]
