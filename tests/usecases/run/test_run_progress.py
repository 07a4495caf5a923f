"""Progress of a run: why it waits, its workers, and cached counters that never decrease."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from conveyor.domain import limits
from conveyor.domain.ids import RunId
from conveyor.domain.model import Job, PauseState, Run, ShardCounters, Totals
from conveyor.domain.queries import StatsOf
from conveyor.domain.run.wait_reason import RunProgress, RunReport, WaitReason, WorkerReport
from conveyor.engines.redis.cache import ANSWER_S, RedisCache
from conveyor.ports.coordinator import Coordinator
from conveyor.ports.errors import Unavailable
from conveyor.ports.store import Store
from conveyor.simulation.models.fault_rates import CallFaults, RedisFaults
from conveyor.usecases.context import Context
from conveyor.usecases.lookup import load_owned_job, totals_of
from conveyor.usecases.run import run_progress, runs
from conveyor.usecases.run.run_progress import (
    WAIT_TIMEOUT_S,
    cached_totals,
    invalidate_totals,
)
from conveyor.usecases.submit import jobs
from tests.builders import CALLER, ManualClock, a_run, a_stats
from tests.simulation.models.worlds import World
from tests.usecases.world import a_world, add, run_of, submit, work

SHARDS = 4


@dataclass(slots=True)
class CountedStore:
    """A store that counts the queries for counters."""

    store: Store
    queries: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    async def find(self, query: Any) -> list[Any]:
        self.queries += isinstance(query, StatsOf)
        return await self.store.find(query)


@dataclass(slots=True)
class BusyStore:
    """A store whose counters rise all the time, each shard's at its own moments."""

    random: Random
    slow_s: float

    async def find(self, _: Any) -> list[ShardCounters]:
        rows = []
        for shard in range(SHARDS):
            await trio.sleep(self.random.uniform(0.0, self.slow_s / SHARDS))
            done = int(trio.current_time() * 50) + shard
            rows.append(a_stats(shard, done=done, successful=done - shard // 2))
        await trio.sleep(self.random.uniform(0.0, self.slow_s))
        return rows


def a_cache(redis: World, seed: int = 1) -> RedisCache:
    return RedisCache(redis.redis.link(), Random(seed), space="s")


def an_env(redis: World) -> tuple[Context, CountedStore]:
    env = a_world().env
    store = CountedStore(env.store)
    return replace(env, store=cast("Store", store), cache=a_cache(redis)), store


async def an_open_run(env: Context, count: int = 5) -> Run:
    accepted = await submit(env, count, is_open=True)
    return await run_of(env, accepted.run)


@pytest.fixture
def redis() -> World:
    return World()


async def test_of_concurrent_readers_one_reads_the_store_and_all_see_its_value_for_a_second(
    redis: World, autojump_clock: MockClock
) -> None:
    env, store = an_env(redis)
    run = await an_open_run(env)
    seen: list[int] = []

    async def look() -> None:
        seen.append((await cached_totals(env, run)).done)

    store.queries = 0
    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(look)
    reads = store.queries
    await work(env, run, count=2)
    await look()
    await trio.sleep(limits.CACHED_COUNTERS_TTL_S)
    await look()

    assert seen == [0] * 21 + [2]
    assert reads == 1


async def test_a_change_of_the_run_is_shown_at_once(
    redis: World, autojump_clock: MockClock
) -> None:
    env, _ = an_env(redis)
    run = await an_open_run(env)
    seen = [await cached_totals(env, run)]

    await work(env, run, count=1)
    added = await add(env, added_to := await _job_of(env, run), 3)
    seen.append(await cached_totals(env, await run_of(env, added.run)))
    await work(env, run, count=1)
    paused = await runs.set_pause(env, CALLER, added_to.job_id, PauseState.PAUSED)
    seen.append(await cached_totals(env, paused))
    await work(env, run, count=1)
    await jobs.close(env, CALLER, added_to.job_id)
    seen.append(await cached_totals(env, await run_of(env, run)))

    assert [(totals.admitted, totals.done) for totals in seen] == [(5, 0), (8, 1), (8, 2), (8, 3)]


async def _job_of(env: Context, run: Run) -> Job:
    return await load_owned_job(env, CALLER, run.job_id)


async def test_invalidating_the_counters_makes_the_next_read_fresh(
    redis: World, autojump_clock: MockClock
) -> None:
    env, _ = an_env(redis)
    run = await an_open_run(env)
    await cached_totals(env, run)

    await work(env, run, count=1)
    await invalidate_totals(env, run)

    assert (await cached_totals(env, run)).done == 1


@pytest.mark.parametrize("fields", [{"stop_requested_at": 1.0}, {"open_batches": 1}])
async def test_a_run_that_has_ended_or_is_being_ingested_is_always_read_from_the_store(
    redis: World, fields: dict[str, Any], autojump_clock: MockClock
) -> None:
    env, store = an_env(redis)
    assert env.cache is not None

    for _ in range(3):
        await cached_totals(env, a_run(shard_count=SHARDS, **fields))
        await invalidate_totals(env, a_run(shard_count=SHARDS, **fields))

    assert store.queries == 3
    assert not cast("RedisCache", env.cache).outcomes


async def test_while_redis_is_unavailable_the_store_is_read_with_little_delay(
    redis: World, autojump_clock: MockClock
) -> None:
    env, _ = an_env(redis)
    run = await an_open_run(env)
    await cached_totals(env, run)
    redis.set_faults(RedisFaults(slow_rate=1.0, slow_s=(60.0, 60.0)))
    started_at = trio.current_time()

    seen = []
    for _ in range(5):
        await work(env, run, count=1)
        seen.append((await cached_totals(env, run)).done)
    lost_s = trio.current_time() - started_at
    redis.clear_faults()
    await trio.sleep(limits.CACHED_COUNTERS_TTL_S)
    seen.append((await cached_totals(env, run)).done)

    assert seen == [1, 2, 3, 4, 5, 5]
    assert lost_s <= ANSWER_S
    assert set(cast("RedisCache", env.cache).outcomes) == {"yours", "away"}


async def test_a_reader_that_dies_with_a_ticket_delays_others_only_briefly(
    redis: World, autojump_clock: MockClock
) -> None:
    env, store = an_env(redis)
    run = await an_open_run(env)
    stuck = replace(env, store=cast("Store", BusyStore(Random(1), slow_s=3600.0)))
    with trio.move_on_after(0.01):
        await cached_totals(stuck, run)
    started_at = trio.current_time()

    store.queries = 0
    await cached_totals(env, run)

    assert store.queries == 1
    assert trio.current_time() - started_at <= WAIT_TIMEOUT_S + 0.1


@pytest.mark.parametrize("seed", range(12))
async def test_counts_never_decrease_for_any_reader(seed: int, autojump_clock: MockClock) -> None:
    """Several processes, some of them slow; keys are evicted and store calls are cancelled."""
    redis, random = World(seed=seed), Random(seed)
    readings: list[tuple[float, float, Totals]] = []
    calls = CallFaults(latency_s=(0.0, random.choice((0.001, 0.05, 0.2))))
    redis.set_faults(calls, RedisFaults(evicted_rate=random.choice((0.0, 0.05))))

    async def read_often(env: Context) -> None:
        for _ in range(40):
            await trio.sleep(random.uniform(0.0, random.choice((0.05, 0.5))))
            started_at = trio.current_time()
            run = a_run(shard_count=SHARDS, batches_seq=int(started_at / 3))
            with trio.move_on_after(random.choice((0.05, 5.0))) as scope:
                totals = await cached_totals(env, run)
            if not scope.cancelled_caught:
                readings.append((started_at, trio.current_time(), totals))

    async with trio.open_nursery() as nursery:
        for number in range(4):
            slow_s = random.choice((0.01, 0.1, 1.5))
            env = replace(
                a_world().env,
                store=cast("Store", BusyStore(Random(number), slow_s)),
                cache=a_cache(redis, number),
            )
            for _ in range(2):
                nursery.start_soon(read_often, env)

    assert [*map(partial(_decreases, readings), readings)] == [[]] * len(readings)
    assert len(readings) > 100


def _decreases(
    readings: list[tuple[float, float, Totals]], before: tuple[float, float, Totals]
) -> list[Totals]:
    """The later readings that show less than this one."""
    _, ended_at, old = before
    return [
        new
        for started_at, _, new in readings
        if started_at > ended_at
        and (new.done < old.done or new.successful < old.successful or new.failed < old.failed)
    ]


async def test_a_process_that_lost_redis_for_a_while_shows_no_older_counts_than_before(
    redis: World, autojump_clock: MockClock
) -> None:
    """Other processes kept their connection and stored what they read meanwhile."""
    run, store = a_run(shard_count=SHARDS), cast("Store", BusyStore(Random(1), slow_s=0.0))
    here, there = (
        replace(a_world().env, store=store, cache=a_cache(redis, seed)) for seed in (1, 2)
    )
    readings = []
    for number in range(400):
        if number == 50:
            redis.set_faults(RedisFaults(killed_rate=1.0))
            readings.append((await cached_totals(here, run)).done)
            redis.clear_faults()
        await cached_totals(there, run)
        readings.append((await cached_totals(here, run)).done)
        await trio.sleep(0.01)

    assert readings == sorted(readings)
    assert cast("RedisCache", here.cache).outcomes["found"] > 0


async def test_an_error_of_the_store_is_raised(redis: World, autojump_clock: MockClock) -> None:
    @dataclass
    class UnavailableStore:
        async def find(self, _: Any) -> list[ShardCounters]:
            raise Unavailable("the table")

    env = replace(a_world().env, store=cast("Store", UnavailableStore()), cache=a_cache(redis))

    with pytest.raises(Unavailable, match="the table"):
        await cached_totals(env, a_run())


class UnavailableCoordinator:
    """A coordinator that does not answer."""

    async def count(self, run_id: RunId) -> int:
        raise Unavailable("away")

    async def list_status(self, subject: str) -> list[str]:
        raise Unavailable("away")


async def progress_of(env: Context, run: Run) -> RunProgress:
    return await run_progress.load_progress(env, run, await totals_of(env, run))


async def test_progress_is_made_of_leases_and_the_reports_of_all_processes(
    env: Context,
) -> None:
    run = (await submit(env, 100, max_inflight=4)).run
    await env.coordinator.acquire(run.job_id, run.run_id, count_max=9, cap=4, ttl_s=60)
    for process_id, rate in (("p-1", 0.5), ("p-2", 1.5)):
        process = replace(env, process_id=process_id)
        report = RunReport(WaitReason.JOB_CAP, since=7.0, rate=rate)
        await run_progress.publish_presence(process, WorkerReport(50, 4))
        await run_progress.publish_reports(process, {run.run_id: report})

    progress = await progress_of(env, run)

    assert progress.waiting_on is not None
    assert (progress.waiting_on.reason, progress.waiting_on.since) == (WaitReason.JOB_CAP, 7.0)
    assert (progress.inflight, progress.rate_per_s, progress.eta_s) == (4, 2.0, 50.0)


async def test_reports_that_are_not_renewed_expire(env: Context, clock: ManualClock) -> None:
    run = (await submit(env, 2)).run
    report = RunReport(rate=1.0)
    await run_progress.publish_presence(env, WorkerReport(50, 1))
    await run_progress.publish_reports(env, {run.run_id: report})

    clock.advance(limits.STATUS_TTL_S + 1)
    progress = await progress_of(env, run)

    assert progress.waiting_on is not None
    assert progress.waiting_on.reason is WaitReason.NO_WORKERS
    assert (progress.rate_per_s, await run_progress.live_workers(env)) == (0.0, [])


async def test_the_progress_of_an_ended_run_or_during_an_outage_is_empty(env: Context) -> None:
    live, ended = (await submit(env, 1)).run, (await submit(env, 1)).run
    await work(env, ended)
    away = replace(env, coordinator=cast("Coordinator", UnavailableCoordinator()))

    assert await progress_of(env, await run_of(env, ended)) == RunProgress()
    assert await progress_of(away, live) == RunProgress()
    assert await progress_of(env, live) != RunProgress()


async def test_a_worker_that_withdraws_its_report_is_no_longer_listed(env: Context) -> None:
    for process_id, worker in (("p-1", "zoe"), ("p-2", "ada")):
        process = replace(env, process_id=process_id)
        await run_progress.publish_presence(process, WorkerReport(50, 0, worker=worker))
    before = await run_progress.live_workers(env)

    await run_progress.withdraw_presence(replace(env, process_id="p-2"))

    assert [report.worker for report in before] == ["ada", "zoe"]
    assert [report.worker for report in await run_progress.live_workers(env)] == ["zoe"]


async def test_abandoned_calls_of_all_processes_are_counted_until_they_must_have_ended(
    env: Context, clock: ManualClock
) -> None:
    run, other = (await submit(env, 1)).run, (await submit(env, 1)).run
    for process_id, count in (("p-1", 2), ("p-2", 3)):
        await run_progress.leave_abandoned(replace(env, process_id=process_id), run.run_id, count)

    counts = [
        await run_progress.count_abandoned(env, ended_run.run_id) for ended_run in (run, other)
    ]
    clock.advance(limits.SCRAPE_DEADLINE_S + 1)

    assert counts == [5, 0]
    assert await run_progress.count_abandoned(env, run.run_id) == 0


async def test_the_overview_lists_live_runs_with_their_counters(env: Context) -> None:
    live, ended = (await submit(env, 3)).run, (await submit(env, 1)).run
    await work(env, ended)
    await work(env, live, count=2)

    (readings,) = await run_progress.live_runs(env, limit=10)

    assert (readings.run.run_id, readings.totals.done) == (live.run_id, 2)
    assert readings.outlook == await progress_of(env, readings.run)
