"""Tests each fault of the model of Redis, and compares its scripts with a server's."""

from __future__ import annotations

from random import Random

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from conveyor.domain.ids import JobId, LeaseId, RunId
from conveyor.engines.redis.connection import RedisChannel, RedisConnection, open_link
from conveyor.engines.redis.coordinator import RedisCoordinator
from conveyor.ports.coordinator import Coordinator, HostPool
from conveyor.ports.errors import Unavailable
from conveyor.simulation.models import FaultSource, RedisModel
from conveyor.simulation.models.fault_rates import RedisFaults
from tests.builders import JOB, RUN, ManualClock
from tests.conformance.coordinators import LinkAt, a_space
from tests.simulation.models.worlds import World


def a_coordinator(world: World, seed: int = 1) -> RedisCoordinator:
    return RedisCoordinator(world.redis.link(), Random(seed), space="s")


async def take(coordinator: Coordinator, cap: int = 10) -> list[LeaseId]:
    return await coordinator.acquire(JOB, RUN, count_max=1, cap=cap, ttl_s=60)


async def test_redis_may_be_unavailable_for_minutes(
    world: World, autojump_clock: MockClock
) -> None:
    coordinator = a_coordinator(world)
    world.set_faults(RedisFaults(down_rate=1.0, down_s=(300.0, 300.0)))

    with pytest.raises(Unavailable):
        await take(coordinator)
    world.clear_faults()
    with pytest.raises(Unavailable):
        await take(coordinator)
    await trio.sleep(300)

    assert len(await take(coordinator)) == 1
    assert world.fault_source.fault_counts["redis.down"] == 1


async def test_a_failover_loses_the_last_writes(world: World, autojump_clock: MockClock) -> None:
    coordinator = a_coordinator(world)
    await take(coordinator)
    await trio.sleep(20)
    await take(coordinator)
    world.set_faults(RedisFaults(failover_rate=1.0, failover_lost_s=(10.0, 10.0)))

    count = await coordinator.count(RUN)

    assert count == 1
    assert world.fault_source.fault_counts["redis.failover"] > 0


async def test_two_primaries_exceed_the_cap_and_the_leases_of_one_are_lost(
    world: World, autojump_clock: MockClock
) -> None:
    coordinators = [a_coordinator(world, seed) for seed in range(8)]
    world.set_faults(RedisFaults(split_rate=1.0, split_s=(30.0, 30.0)))

    leases = [lease for coordinator in coordinators for lease in await take(coordinator, cap=1)]
    world.clear_faults()
    await trio.sleep(31)

    assert len(leases) == 2
    assert len(await coordinators[0].renew(leases, ttl_s=60)) == 1
    assert world.fault_source.fault_counts["redis.split"] == 1


async def test_a_key_may_be_evicted(world: World) -> None:
    coordinator = a_coordinator(world)
    leases = await take(coordinator)
    world.set_faults(RedisFaults(evicted_rate=1.0))

    await coordinator.count(RUN)
    await coordinator.count(RUN)
    world.clear_faults()

    assert await coordinator.renew(leases, ttl_s=60) == frozenset(leases)


async def test_a_script_may_be_killed_before_it_writes(world: World) -> None:
    coordinator = a_coordinator(world)
    world.set_faults(RedisFaults(killed_rate=1.0))

    with pytest.raises(Unavailable):
        await take(coordinator)
    world.clear_faults()

    assert await coordinator.count(RUN) == 0


async def test_redis_may_be_slow(world: World, autojump_clock: MockClock) -> None:
    coordinator = a_coordinator(world)
    await take(coordinator)
    world.set_faults(RedisFaults(slow_rate=1.0, slow_s=(1.0, 1.0)))
    start = trio.current_time()

    await coordinator.renew(await take(coordinator), ttl_s=60)

    assert trio.current_time() - start == 2.0


async def test_signals_arrive_until_the_connection_of_a_listener_is_lost(
    world: World, autojump_clock: MockClock
) -> None:
    signals: list[tuple[JobId, RunId]] = []

    async def record_signal(job_id: JobId, run_id: RunId, tasks: int) -> None:
        signals.append((job_id, run_id))

    here, there = world.redis.link(), world.redis.link()
    listener = RedisChannel(here, space="s", owner="listener")
    sender = RedisChannel(there, space="s", owner="sender")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(listener.listen_forever, record_signal)
        await trio.testing.wait_all_tasks_blocked()

        await sender.tell(JOB, RUN)
        await trio.sleep(0.1)
        world.set_faults(RedisFaults(deaf_rate=1.0))
        for _ in range(5):
            await sender.tell(JOB, RUN)
        world.clear_faults()
        signals_before = len(signals)
        await sender.tell(JOB, RUN)
        await trio.sleep(2.0)
        await sender.tell(JOB, RUN)
        await trio.sleep(0.1)

        assert 0 < signals_before < 6
        assert len(signals) == signals_before + 1
        nursery.cancel_scope.cancel()


steps = st.tuples(
    st.sampled_from(["acquire", "enter", "renew", "restore", "release", "count", "mark", "wait"]),
    st.integers(0, 3),
    st.integers(1, 3),
)


@pytest.mark.slow
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(script=st.lists(steps, min_size=30, max_size=30))
async def test_the_model_answers_as_a_server_does(
    redis: str, script: list[tuple[str, int, int]]
) -> None:
    clock, space = ManualClock(), a_space()
    model = RedisModel(clock=clock, fault_source=FaultSource(random=Random(1)))
    async with open_link(redis) as link:
        ours = await _run_script(model.link(), space, clock, script)
        clock.at = ManualClock().at
        theirs = await _run_script(LinkAt(link, clock), space, clock, script)

    assert ours == theirs


async def _run_script(
    link: RedisConnection, space: str, clock: ManualClock, script: list[tuple[str, int, int]]
) -> list[object]:
    coordinator = RedisCoordinator(link, Random(1), space=space)
    leases: list[LeaseId] = []
    answers: list[object] = []
    for verb, pick, count in script:
        batch = leases[pick : pick + count]
        match verb:
            case "acquire":
                taken = await coordinator.acquire(JOB, RUN, count_max=count, cap=4, ttl_s=2)
                leases += taken
                answers.append(taken)
            case "enter":
                pools = [HostPool(JOB, f"h{pick}", cap=count, spacing_s=0.5 * pick)] * count
                passed = await coordinator.acquire_hosts(pools, ttl_s=2)
                leases += [lease for lease in passed if lease is not None]
                answers.append(passed)
            case "renew":
                answers.append(await coordinator.renew(batch, ttl_s=2))
            case "restore":
                await coordinator.restore(batch, ttl_s=2)
            case "release":
                await coordinator.release(batch)
            case "count":
                answers.append(await coordinator.count(RUN))
            case "mark":
                await coordinator.put_status(f"w{pick}", {"x": f"m{count} \u00e9"}, ttl_s=5 * count)
                answers.append(await coordinator.list_status("x"))
            case _:
                clock.advance(pick * 0.5)
    return answers
