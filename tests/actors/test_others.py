"""Discovery, ingest, notices and the sweeper: what each does when something went missing."""

from __future__ import annotations

from dataclasses import replace

import trio
from trio.testing import MockClock

from actors.runtime import Supervisor
from conveyor.domain.model import NoticeStatus, RunStatus, TaskStatus, Webhook
from conveyor.domain.queries import DueNotices
from conveyor.usecases.context import RuntimeConfig
from conveyor.usecases.submit import jobs
from tests.actors.faults import Faults, faulty
from tests.actors.world import CALLER, World, make_world, urls

HOOK = Webhook("https://example.com/hook")


def deaf(world: World) -> World:
    """A world whose signals reach nobody: discovery and sweeper have to find out by themselves."""

    class Silence:
        async def run_changed(self, *_: object) -> None:
            return None

        async def batch_opened(self, *_: object) -> None:
            return None

        async def teardown(self, *_: object, deadline_s: float) -> jobs.Accepted:
            raise AssertionError("not used")

    return replace(world, env=replace(world.env, signals=Silence()))  # type: ignore[arg-type]


async def test_discovery_finds_a_run_that_nobody_told_it_of(autojump_clock: MockClock) -> None:
    world = deaf(make_world())

    async with world.working():
        await trio.sleep(30)
        accepted = await world.submit(urls(5))
        _, totals = await world.ended(accepted, within_s=30)

    assert totals.successful == 5


async def test_a_list_that_nobody_walks_is_found_by_the_sweeper(
    autojump_clock: MockClock,
) -> None:
    world = deaf(make_world(think_s=0))
    policy = RuntimeConfig(sync_tasks_max=100)
    world = replace(world, env=replace(world.env, policy=policy))

    async with world.working():
        await trio.sleep(1)
        accepted = await world.submit(urls(2_500))
        assert accepted.is_later
        run, totals = await world.ended(accepted, within_s=120)

    assert totals.successful == run.total == 2_500


async def test_a_list_that_cannot_be_read_stops_its_run_with_a_reason(
    autojump_clock: MockClock,
) -> None:
    world = make_world()
    policy = RuntimeConfig(sync_tasks_max=100)
    world = replace(world, env=replace(world.env, policy=policy))
    accepted = await world.submit(urls(150))
    await world.env.blobs.delete_prefix(f"sources/{accepted.job.job_id}")

    async with world.working():
        run, _ = await world.ended(accepted, within_s=600)

    assert run.status is RunStatus.STOPPED
    assert run.stop_reason == "ingest_failed"


async def test_messages_that_were_lost_are_sent_again(autojump_clock: MockClock) -> None:
    world = make_world()
    accepted = await world.submit(urls(20))
    await world.env.queue.close_run(accepted.run.run_id)

    async with world.working():
        run, totals = await world.ended(accepted, within_s=120)

    assert (run.status, totals.successful) == (RunStatus.COMPLETED, 20)


async def test_a_completed_run_is_told_until_the_receiver_takes_it(
    autojump_clock: MockClock,
) -> None:
    world = make_world()
    world.notifier.failures = 4

    async with world.working():
        accepted = await world.submit(urls(1), webhook=HOOK)
        await world.ended(accepted)
        await trio.sleep(3_600)

    assert len(world.notifier.tried) == 5
    assert len({message.event_id for message in world.notifier.tried}) == 1
    assert len({message.payload for message in world.notifier.tried}) == 1
    query = DueNotices(
        statuses=frozenset({NoticeStatus.DUE}), due_by=world.env.now() + 1e9, limit=10
    )
    assert await world.env.store.find(query) == []


async def test_scraping_goes_on_while_a_receiver_is_down(autojump_clock: MockClock) -> None:
    world = make_world()
    world.notifier.failures = 10**6

    async with world.working():
        await world.ended(await world.submit(urls(1), webhook=HOOK))
        accepted = await world.submit(urls(100))
        _, totals = await world.ended(accepted, within_s=60)

    assert totals.successful == 100


async def test_a_deleted_job_is_scrubbed_twice_and_nothing_is_left(
    autojump_clock: MockClock,
) -> None:
    world = make_world()

    async with world.working():
        accepted = await world.submit(urls(200))
        await world.ended(accepted)
        await jobs.delete(world.env, CALLER, accepted.job.job_id)
        await trio.sleep(600)

    assert await world.tasks(accepted) == []
    assert await world.env.blobs.delete_prefix(f"jobs/{accepted.job.job_id}") == 0


async def test_an_outage_of_the_store_delays_a_run_and_loses_nothing(
    autojump_clock: MockClock,
) -> None:
    world = make_world(think_s=1, capacity=5)
    faults = Faults()
    world = replace(
        world,
        env=replace(
            world.env,
            store=faulty(world.env.store, faults),
            queue=faulty(world.env.queue, faults),
        ),
    )

    async with world.working():
        accepted = await world.submit(urls(60))
        for _ in range(8):
            await trio.sleep(1.3)
            for method in ("commit", "receive", "ack", "find"):
                faults.before[method] += 1
                faults.after[method] += 1
        run, totals = await world.ended(accepted, within_s=900)

    rows = await world.tasks(accepted)
    assert run.status is RunStatus.COMPLETED
    assert totals.done == totals.successful == len(rows) == 60
    assert {row.status for row in rows} == {TaskStatus.SUCCESSFUL}
    assert faults.fired.total() > 20


async def test_a_crash_of_the_heartbeater_restarts_whatever_leans_on_it(
    autojump_clock: MockClock,
) -> None:
    world = make_world(think_s=5)

    async with world.working() as supervisor:
        accepted = await world.submit(urls(30))
        await trio.sleep(2)
        world.mail.heartbeater.address.tell_nowait(None)  # type: ignore[arg-type]
        _, totals = await world.ended(accepted, within_s=600)
        assert restarts(supervisor, "lease_heartbeater") == 1
        assert restarts(supervisor, "queue_discovery") == 1

    assert totals.successful == 30


def restarts(supervisor: Supervisor, name: str) -> int:
    (record,) = [record for record in supervisor.records() if record.child.name == name]
    return record.restart_count
