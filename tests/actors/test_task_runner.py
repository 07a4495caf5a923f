"""TaskRunner: what becomes of one task, whatever happens around it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import trio
from trio.testing import MockClock

from conveyor.domain import limits
from conveyor.domain.model import FailureReason, RunStatus
from conveyor.ports.gateway import Outcome, ScrapeRequest
from conveyor.usecases import tasks
from tests.actors.faults import Faults, faulty
from tests.actors.world import a_miss, a_page, make_world, urls


@pytest.mark.parametrize("think_s", [limits.BEAT_S - 0.02, limits.BEAT_S, limits.BEAT_S + 0.02])
async def test_a_retry_that_is_settled_during_a_beat_comes_back_on_time(
    autojump_clock: MockClock, think_s: float
) -> None:
    def script(request: ScrapeRequest, attempt: int) -> Outcome:
        return a_miss() if attempt == 1 else a_page()

    world = make_world(script=script, think_s=think_s)
    slow = faulty(world.env.queue, Faults(latency_s={"extend": 0.05, "bounce": 0.01}))
    world = replace(world, env=replace(world.env, queue=slow))

    async with world.working():
        accepted = await world.submit(urls(30))
        _, totals = await world.ended(accepted)

    assert totals.successful == 30
    assert trio.current_time() < 2 * think_s + 10


async def test_a_task_that_loses_its_worker_each_time_comes_to_an_end(
    autojump_clock: MockClock,
) -> None:
    world = make_world()
    accepted = await world.submit(urls(1), max_attempts=2)
    for _ in range(1 + limits.LOST_WORKERS_MAX):
        (message,) = await world.env.queue.receive(
            accepted.run.run_id, count_max=1, visibility_s=limits.VISIBILITY_S
        )
        (await tasks.claim(world.env, [message.ref]))[0]
        await trio.sleep(limits.CLAIM_TTL_S + 1)

    async with world.working():
        run, totals = await world.ended(accepted)

    (task,) = await world.tasks(accepted)
    assert (run.status, totals.failed) == (RunStatus.COMPLETED, 1)
    assert task.problem is not None
    assert task.problem.code == "worker_crashed"
    assert world.gateway.calls.total() == 0


async def test_a_task_that_somebody_else_holds_is_left_to_them(autojump_clock: MockClock) -> None:
    world = make_world()
    accepted = await world.submit(urls(1))
    (message,) = await world.env.queue.receive(accepted.run.run_id, count_max=1, visibility_s=1)
    (await tasks.claim(world.env, [message.ref]))[0]

    async with world.working():
        await trio.sleep(limits.CLAIM_TTL_S - 5)
        assert world.gateway.calls.total() == 0
        _, totals = await world.ended(accepted)

    assert totals.successful == 1


async def test_what_a_site_asks_for_in_retry_after_is_honoured(autojump_clock: MockClock) -> None:
    times: list[float] = []

    def script(request: ScrapeRequest, attempt: int) -> Outcome:
        times.append(trio.current_time())
        if attempt > 1:
            return a_page()
        return msgspec.structs.replace(a_miss(FailureReason.RATE_LIMITED), retry_after_s=77.0)

    world = make_world(script=script, think_s=0)

    async with world.working():
        await world.ended(await world.submit(urls(1)))

    first, second = times
    assert 77.0 <= second - first < 80.0
