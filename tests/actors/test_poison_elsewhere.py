"""Notices, exports, schedules and sweeps: what crashes over one item leaves the others alone."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from actors.messages import RunChanged
from conveyor.domain import limits
from conveyor.domain.changes import JobKey
from conveyor.domain.export.export import ExportFormat, ExportStatus
from conveyor.domain.ids import JobId
from conveyor.domain.model import Webhook
from conveyor.domain.queries import NoticesOf
from conveyor.ports.webhook_sender import Delivered, Message, NotDelivered
from conveyor.usecases import export as exports
from conveyor.usecases.run import runs
from tests.actors.world import CALLER, make_world, urls


def has_crashed_actor(caplog: pytest.LogCaptureFixture) -> bool:
    return any(record.getMessage().startswith("child ") for record in caplog.records)


class AllergicNotifier:
    """Crashes over every notice to one receiver."""

    def __init__(self) -> None:
        self.tried: list[str] = []

    async def resolve(self, webhook: Webhook, partition: str) -> None:
        return None

    async def deliver(self, message: Message) -> Delivered | NotDelivered:
        await trio.lowlevel.checkpoint()
        self.tried.append(message.webhook.url)
        if "poison" in message.webhook.url:
            raise KeyError("a header of the receiver")
        return Delivered(204)


async def test_a_notice_that_crashes_its_delivery_is_a_try_that_failed(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "WEBHOOK_GIVE_UP_S", 300.0)
    notifier = AllergicNotifier()
    world = replace(make_world(), notifier=cast("Any", notifier))

    async with world.working():
        poisoned = await world.submit(urls(1), webhook=Webhook("https://poison.example/"))
        good = await world.submit(urls(1), webhook=Webhook("https://good.example/"))
        await world.ended(poisoned)
        await world.ended(good)
        await trio.sleep(1800)

    query = NoticesOf(job_id=poisoned.job.job_id, run_id=poisoned.run.run_id, limit=10)
    (notice,) = await world.env.store.find(query)
    assert notifier.tried.count("https://good.example/") == 1
    assert 2 <= notifier.tried.count("https://poison.example/") < 50
    assert notice.last_error == "worker_crashed"
    assert notice.status.value == "exhausted"
    assert not has_crashed_actor(caplog)


async def test_an_export_that_crashes_its_maker_fails_after_a_few_tries(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    accepted = await world.submit(urls(3))

    async with world.working():
        await world.ended(accepted)
        tries = 0

        async def crash(*_: object) -> None:
            nonlocal tries
            tries += 1
            await trio.lowlevel.checkpoint()
            raise IndexError("a row that nobody thought of")

        monkeypatch.setattr(exports, "_make", crash)
        run_id = accepted.run.run_id
        export = await exports.start(
            world.env,
            CALLER,
            accepted.job.job_id,
            run_id,
            ExportFormat.CSV,
            export_id=world.env.new_id(),
        )
        await trio.sleep(900)

    found = await exports.own_export(
        world.env, CALLER, accepted.job.job_id, run_id, export.export_id
    )
    assert found.status is ExportStatus.FAILED
    assert tries < 20
    assert not has_crashed_actor(caplog)


async def test_a_run_that_crashes_discovery_is_put_off_and_the_others_are_served(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world()
    reads: list[float] = []
    store = world.env.store

    class AllergicStore:
        """Crashes whenever the job of one run is read."""

        async def read(self, key: Any) -> Any:
            if poisoned and key == JobKey(poisoned[0]):
                reads.append(trio.current_time())
                raise ValueError("a job that nobody thought of")
            return await store.read(key)

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

    poisoned: list[JobId] = []
    bad = await world.submit(urls(2))
    world = replace(world, env=replace(world.env, store=cast("Any", AllergicStore())))
    poisoned.append(bad.job.job_id)

    async with world.working():
        good = [await world.submit(urls(5)) for _ in range(3)]
        for accepted in good:
            await world.ended(accepted)
        started_at = trio.current_time()
        while trio.current_time() < started_at + 1800:
            world.mail.discovery.address.tell_nowait(RunChanged(bad.job.job_id, bad.run.run_id))
            await trio.sleep(60)
        tries = len(reads)
        poisoned.clear()
        _, totals = await world.ended(bad, within_s=900)

    assert totals.successful == 2
    assert 4 <= tries <= 10
    crashes = [each for each in caplog.records if "a run crashed" in each.getMessage()]
    assert sum(each.levelno >= logging.ERROR for each in crashes) == 1
    assert not has_crashed_actor(caplog)


async def test_a_run_that_crashes_the_sweeper_does_not_hide_those_behind_it(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(think_s=5.0)
    looked: set[str] = set()
    look = runs.complete_if_done

    async def picky(env: Any, job_id: Any, run_id: Any) -> bool:
        looked.add(run_id)
        if run_id == min(ids):
            raise AssertionError("more tasks are done than were admitted")
        return await look(env, job_id, run_id)

    async with world.working():
        accepted = [await world.submit(urls(2)) for _ in range(3)]
        ids = [each.run.run_id for each in accepted]
        monkeypatch.setattr(runs, "complete_if_done", picky)
        await trio.sleep(60)

    assert looked == set(ids)
    assert not has_crashed_actor(caplog)
    assert await world.env.store.read(JobKey(accepted[0].job.job_id)) is not None
    assert [each for each in caplog.records if each.levelno >= logging.ERROR]
