"""ApiKeyLimiter: permits within the call window of an API key, and leases that all processes
share."""

from __future__ import annotations

import trio
from prometheus_client import CollectorRegistry
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.limiters.api_key_limiter import IDLE_LEASE_S, ApiKeyLimiter
from conveyor.domain import limits
from conveyor.domain.backpressure.call_window import SIZE_FIRST
from conveyor.domain.ids import RunId
from conveyor.telemetry import make_metrics
from conveyor.usecases.context import Context
from tests.builders import CALLER
from tests.usecases.world import a_world

BUSY, IDLE = RunId("busy"), RunId("idle")
WINDOW = int(SIZE_FIRST)


def a_limiter(env: Context | None = None) -> ApiKeyLimiter:
    return ApiKeyLimiter(env or a_world().env, make_metrics(CollectorRegistry()), "key")


async def test_no_more_permits_are_taken_than_the_window_has_room_for() -> None:
    limiter = a_limiter()

    permits = limiter.take_nowait(CALLER, BUSY, count_max=9)
    refused = limiter.take_nowait(CALLER, BUSY, count_max=9)
    permits[0].close()

    assert (len(permits), refused) == (WINDOW, [])
    assert len(limiter.take_nowait(CALLER, BUSY, count_max=9)) == 1


async def test_a_freed_permit_goes_to_the_waiting_run_with_the_fewest_calls() -> None:
    limiter = a_limiter()
    permits = limiter.take_nowait(CALLER, BUSY, count_max=WINDOW)
    served: list[RunId] = []

    async def wait(run_id: RunId) -> None:
        await limiter.acquire(CALLER, run_id, weight=1)
        served.append(run_id)

    async with trio.open_nursery() as nursery:
        for run_id in (BUSY, IDLE):
            nursery.start_soon(wait, run_id)
            await wait_all_tasks_blocked()
        permits[0].close()
        await wait_all_tasks_blocked()
        first = list(served)
        permits[1].close()

    assert (first, served) == ([IDLE], [IDLE, BUSY])


async def test_a_run_that_is_cancelled_while_it_waits_takes_no_permit() -> None:
    limiter = a_limiter()
    permits = limiter.take_nowait(CALLER, BUSY, count_max=WINDOW)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: limiter.acquire(CALLER, IDLE, weight=1))
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        # The permit is granted to the waiter, which is cancelled before it can run.
        permits[0].close()
    permits[1].close()

    assert (limiter.inflight_count, limiter.is_idle) == (0, True)


async def test_an_interrupted_call_counts_until_its_deadline(autojump_clock: MockClock) -> None:
    limiter = a_limiter()
    called, unused = limiter.take_nowait(CALLER, BUSY, count_max=2)
    called.start()
    for permit in (called, unused):
        permit.close()

    counts = [limiter.inflight_count]
    await trio.sleep(limits.SCRAPE_DEADLINE_S - 1)
    counts.append(limiter.inflight_count)
    await trio.sleep(1)

    assert [*counts, limiter.inflight_count] == [1, 1, 0]


async def test_two_processes_together_keep_to_one_limit() -> None:
    env = a_world().env
    here, there = a_limiter(env), a_limiter(env)
    for limiter in (here, there):
        limiter.adopt_limit(["2"])

    leased = await here.lease(here.take_nowait(CALLER, BUSY, count_max=2))
    refused = await there.lease(there.take_nowait(CALLER, BUSY, count_max=2))

    assert (len(leased), refused) == (2, [])
    assert (there.inflight_count, there.room_count) == (0, 0)


async def test_an_idle_lease_is_reused_and_returned_when_nothing_needs_it(
    autojump_clock: MockClock,
) -> None:
    limiter = a_limiter()
    (first,) = await limiter.lease(limiter.take_nowait(CALLER, BUSY, count_max=1))
    first.close()

    (second,) = await limiter.lease(limiter.take_nowait(CALLER, BUSY, count_max=1))
    second.close()
    unused = limiter.pop_unused()
    await trio.sleep(IDLE_LEASE_S)

    assert second.lease_id == first.lease_id
    assert (unused, limiter.pop_unused()) == ([], [first.lease_id])
    assert limiter.is_idle


async def test_the_smallest_limit_of_other_processes_applies_until_this_one_knows_its_own() -> None:
    limiter = a_limiter()

    limiter.adopt_limit(["7", "none", "5"])
    limiter.adopt_limit(["3"])

    assert limiter.limit_text == "5"
