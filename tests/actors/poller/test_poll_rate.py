"""With billed calls, work is grouped for a moment, and no call is made for nothing."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from conveyor.domain.ids import is_ulid
from conveyor.domain.model import TaskStatus
from conveyor.ports.gateway import Outcome, ScrapeRequest
from conveyor.usecases.context import BatchingConfig
from conveyor.usecases.lookup import totals_of
from tests.actors.world import ScriptedGateway, World, make_world, urls

pytestmark = pytest.mark.slow

PATIENT = BatchingConfig(settle_s=2.0, settle_max=720, receive_share=0.05)


class Counting:
    """A port that counts its calls."""

    def __init__(self, port: object, calls: Counter[str]) -> None:
        self._port = port
        self._calls = calls

    def __getattr__(self, method: str) -> Any:
        self._calls[method] += 1
        return getattr(self._port, method)


class RequestedLeases:
    """A coordinator that records how many leases each call requested."""

    def __init__(self, coordinator: object) -> None:
        self._coordinator = coordinator
        self.counts: list[int] = []

    def __getattr__(self, method: str) -> Any:
        return getattr(self._coordinator, method)

    async def acquire(self, job_id: str, run_id: str, *, count_max: int, **kwargs: Any) -> Any:
        if is_ulid(job_id):  # The lease of the sweeper belongs to no job.
            self.counts.append(count_max)
        acquire = self.__getattr__("acquire")
        return await acquire(job_id, run_id, count_max=count_max, **kwargs)


@dataclass(slots=True)
class UnevenGateway(ScriptedGateway):
    """A gateway that takes from half of the think time to one and a half of it."""

    random: random.Random = field(default_factory=lambda: random.Random(1))

    async def scrape(self, request: ScrapeRequest) -> Outcome:
        await trio.sleep(self.think_s * self.random.uniform(-0.5, 0.5) + self.think_s)
        return self.script(request, 1)


def a_patient_world(*, think_s: float, capacity: int = 50) -> tuple[World, Counter[str]]:
    world, calls = make_world(capacity=capacity), Counter[str]()
    env = replace(
        world.env,
        config=replace(world.env.config, pace=PATIENT),
        coordinator=cast("Any", Counting(world.env.coordinator, calls)),
        queue=cast("Any", Counting(world.env.queue, calls)),
    )
    return replace(world, env=env, gateway=UnevenGateway(think_s=think_s)), calls


def settle_groups(world: World) -> float:
    labels = {"kind": "settle"}
    count = world.metrics.registry.get_sample_value("conveyor_group_size_count", labels)
    assert count is not None
    return count


async def test_settles_and_receives_within_a_moment_are_grouped(
    autojump_clock: MockClock,
) -> None:
    world, calls = a_patient_world(think_s=1.0)

    async with world.working():
        accepted = await world.submit(urls(400), max_inflight=50)
        _, totals = await world.wait_for_end(accepted)

    assert totals.successful == 400
    assert settle_groups(world) <= 20
    assert calls["receive"] <= 130


async def test_the_last_settle_is_written_without_waiting_for_others(
    autojump_clock: MockClock,
) -> None:
    world, _ = a_patient_world(think_s=0.1)

    async with world.working():
        await world.wait_for_end(await world.submit(urls(1)))

    assert trio.current_time() < PATIENT.settle_s / 2


async def test_a_job_with_a_cap_of_one_continues_as_soon_as_its_task_has_ended(
    autojump_clock: MockClock,
) -> None:
    world, _ = a_patient_world(think_s=0.1)

    async with world.working():
        await world.wait_for_end(await world.submit(urls(50), max_inflight=1))

    assert trio.current_time() < 50 * 0.1 * 1.5


async def test_leases_are_passed_on_and_renewed_together(autojump_clock: MockClock) -> None:
    world, calls = a_patient_world(think_s=12.0, capacity=20)

    async with world.working():
        accepted = await world.submit(urls(200), max_inflight=20)
        await trio.sleep(100)
        totals = await totals_of(world.env, accepted.run)

    # There were ten heartbeats, and eleven times the leases were too old to be passed on.
    assert totals.done > 100
    assert calls["renew"] <= 25
    sweeps_max = 1 + 100 // 15  # Each call acquires a lease, too.
    assert calls["acquire"] + calls["release"] <= 5 + sweeps_max


async def test_a_page_that_waits_to_be_settled_at_shutdown_is_settled(
    autojump_clock: MockClock,
) -> None:
    world, _ = a_patient_world(think_s=0.1)
    quick, slow = urls(2)
    think = {quick: 0.1, slow: 100.0}

    class TwoPages(ScriptedGateway):
        async def scrape(self, request: ScrapeRequest) -> Outcome:
            await trio.sleep(think[request.url])
            return self.script(request, 1)

    async with replace(world, gateway=TwoPages()).working():
        accepted = await world.submit([quick, slow])
        await trio.sleep(0.5)

    statuses = {task.url: task.status for task in await world.tasks(accepted)}
    assert statuses == {quick: TaskStatus.SUCCESSFUL, slow: TaskStatus.PENDING}


async def test_an_empty_queue_is_polled_with_one_lease(autojump_clock: MockClock) -> None:
    world = make_world(capacity=50)
    coordinator = RequestedLeases(world.env.coordinator)
    world = replace(world, env=replace(world.env, coordinator=cast("Any", coordinator)))
    world.gateway.think_s = 60.0

    async with world.working():
        accepted = await world.submit(urls(10), max_inflight=40)
        await trio.sleep(30)
        idle = coordinator.counts[-5:]
        _, totals = await world.wait_for_end(accepted)

    assert coordinator.counts[0] == 40
    assert idle == [1] * 5
    assert totals.successful == 10
