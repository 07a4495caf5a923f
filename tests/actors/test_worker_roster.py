"""The roster: each run is polled by as many workers as it needs, and is taken over quickly."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import trio
from prometheus_client import CollectorRegistry
from trio.testing import MockClock

from actors.limiters.fair_limiter import FairLimiter
from actors.runtime import Supervisor
from actors.tree import LocalSignals, Mailboxes
from actors.worker_roster import Roster
from conveyor.domain import limits
from conveyor.domain.ids import RunId
from conveyor.domain.ownership import owners_of
from conveyor.domain.run.wait_reason import WorkerReport
from conveyor.telemetry import make_metrics
from conveyor.usecases.run.run_progress import publish_presence
from tests.actors.world import World, make_world, urls

SLOTS = 40


def a_fleet(count: int, *, think_s: float = 1.0) -> list[World]:
    """Workers that share one engine, in which each poll is billed."""
    first = make_world(think_s=think_s)
    config = replace(first.env.config, shares_runs=True)
    worlds = []
    for number in range(count):
        mail = Mailboxes()
        env = replace(
            first.env,
            config=config,
            process_id=f"worker-{number}",
            random=random.Random(number),
            signals=LocalSignals(mail.discovery.address, mail.streamer.address),
        )
        limiter, metrics = FairLimiter(capacity=SLOTS), make_metrics(CollectorRegistry())
        worlds.append(replace(first, env=env, mail=mail, limiter=limiter, metrics=metrics))
    return worlds


@asynccontextmanager
async def working(worlds: Sequence[World]) -> AsyncGenerator[list[tuple[Supervisor, trio.Nursery]]]:
    """Runs each worker in a nursery of its own, so that one can be cancelled."""
    workers: list[tuple[Supervisor, trio.Nursery]] = []

    async def work(world: World, *, task_status: trio.TaskStatus[None]) -> None:
        async with trio.open_nursery() as own:
            supervisor = world.supervisor()
            await own.start(supervisor.run)
            workers.append((supervisor, own))
            task_status.started()

    async with trio.open_nursery() as nursery:
        for world in worlds:
            await nursery.start(work, world)
        await trio.sleep(20)  # By now all workers have read each other's reports.
        yield workers
        nursery.cancel_scope.cancel()


def pollers_of(worlds: Sequence[World], workers: Sequence[tuple[Supervisor, object]]) -> list[int]:
    return [
        number
        for number, (world, (supervisor, _)) in enumerate(zip(worlds, workers, strict=True))
        if world.pollers(supervisor)
    ]


async def test_a_short_list_is_polled_by_one_worker_and_a_long_one_by_all(
    autojump_clock: MockClock,
) -> None:
    worlds = a_fleet(4, think_s=20.0)
    async with working(worlds) as workers:
        short = await worlds[0].submit(urls(5))
        await trio.sleep(15)
        of_short = pollers_of(worlds, workers)
        await worlds[0].wait_for_end(short)
        long = await worlds[0].submit(urls(200), max_inflight=200)
        await trio.sleep(15)
        of_long = pollers_of(worlds, workers)
        await worlds[0].wait_for_end(long)

    names = [world.env.process_id for world in worlds]
    assert of_short == [names.index(owners_of(short.run.run_id, names)[0])]
    assert of_long == [0, 1, 2, 3]
    assert worlds[0].gateway.calls.total() == 205


async def test_the_runs_of_a_dead_worker_are_polled_by_others_within_a_lease_lifetime(
    autojump_clock: MockClock,
) -> None:
    worlds = a_fleet(3, think_s=500.0)
    names = [world.env.process_id for world in worlds]
    async with working(worlds) as workers:
        accepted = await worlds[0].submit(urls(5))
        await trio.sleep(15)
        (owner,) = pollers_of(worlds, workers)
        workers[owner][1].cancel_scope.cancel()
        await trio.sleep(1)
        # As after a kill, the report of the worker stays until it ages out.
        await publish_presence(worlds[owner].env, WorkerReport(60, 5, worker=names[owner]))
        await trio.sleep(limits.LEASE_TTL_S)
        heirs = set(pollers_of(worlds, workers)) - {owner}

    left = [name for name in names if name != names[owner]]
    assert [names[heir] for heir in heirs] == owners_of(accepted.run.run_id, left)


async def test_a_run_that_moves_to_another_worker_is_fetched_once(
    autojump_clock: MockClock,
) -> None:
    worlds = a_fleet(6, think_s=30.0)
    async with working(worlds[:1]):
        jobs = [await worlds[0].submit(urls(5)) for _ in range(8)]
        await trio.sleep(5)
        async with working(worlds[1:]) as others:
            moved = pollers_of(worlds[1:], others)
            for accepted in jobs:
                await worlds[0].wait_for_end(accepted)

    assert moved, "the newcomers own some of the runs"
    assert worlds[0].gateway.calls.total() == 40


async def test_a_worker_without_reports_of_others_owns_everything(
    autojump_clock: MockClock,
) -> None:
    roster = Roster("me", slots=SLOTS, is_shared=True)
    subjects = [RunId(f"run-{number}") for number in range(50)]

    unknown = roster.is_unknown
    roster.update(frozenset({"me", "you", "another"}))
    own = [roster.owns(subject) for subject in subjects]
    first = await roster.wait_changed(1.0)
    second = await roster.wait_changed(1.0)
    await trio.sleep(limits.PRESENCE_TTL_S)

    assert unknown
    assert 5 < sum(own) < 30
    assert (first, second) == (True, False)
    assert await roster.wait_changed(1.0)
    assert all(roster.owns(subject) for subject in subjects)


async def test_other_workers_look_for_due_work_more_rarely_until_they_own_it(
    autojump_clock: MockClock,
) -> None:
    workers = frozenset({"a", "b"})
    (owner,) = owners_of("exports", workers)
    (other,) = workers - {owner}
    rosters = [Roster(name, slots=1, is_shared=True) for name in (owner, other)]
    waits = []
    for roster in rosters:
        roster.update(workers)
        began_at = trio.current_time()
        await roster.wait_turn("exports", 1.0)
        waits.append(trio.current_time() - began_at)
    rosters[1].update(frozenset({other}))
    began_at = trio.current_time()
    await rosters[1].wait_turn("exports", 1.0)

    assert waits == [1.0, 6.0]
    assert trio.current_time() - began_at == 1.0
