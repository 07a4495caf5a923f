"""Fair shares of callers and runs with real pollers: slots are shared, and so are the starts of
fetches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
import trio
from trio.testing import MockClock

from conveyor.domain.budget import Price
from conveyor.domain.ids import CallerId
from conveyor.domain.submit.target import host_of
from conveyor.ports.gateway import Outcome, ScrapeRequest
from tests.actors.world import World, a_page, make_world, urls

pytestmark = pytest.mark.slow

WINDOW_S = 60.0


@dataclass(slots=True)
class Starts:
    """A gateway that records when each fetch began, by host; each caller fetches from its own
    host."""

    think_s: float
    begun: list[tuple[float, str]] = field(default_factory=list)

    def price(self, params: Mapping[str, str]) -> Price:
        return Price()

    async def scrape(self, request: ScrapeRequest) -> Outcome:
        self.begun.append((trio.current_time(), host_of(request.url) or ""))
        await trio.sleep(self.think_s)
        return a_page()

    def least_share(self, host: str, *, since: float, until: float) -> float:
        """The smallest share of all starts that this host had in any window between two instants.
        Only windows that begin at a start need to be checked."""
        shares = []
        for begin, _ in self.begun:
            if since <= begin <= until - WINDOW_S:
                window = [caller for at, caller in self.begun if begin <= at < begin + WINDOW_S]
                shares.append(window.count(host) / len(window))
        return min(shares)


def a_world(*, capacity: int, think_s: float) -> tuple[World, Starts]:
    starts = Starts(think_s)
    return replace(make_world(capacity=capacity), gateway=starts), starts  # type: ignore[arg-type]


def hosts(count: int) -> Sequence[str]:
    return [f"caller-{number}.example.com" for number in range(count)]


async def test_each_backlogged_caller_gets_half_of_its_even_share_in_every_minute(
    autojump_clock: MockClock,
) -> None:
    world, starts = a_world(capacity=10, think_s=2.0)
    busy = hosts(4)

    async with world.working():
        for host, runs_count in zip(busy, (1, 3, 9, 27), strict=True):
            # Each caller starts a little later and has more runs, and neither affects its share.
            for _ in range(runs_count):
                await world.submit(urls(540 // runs_count, host), caller=CallerId(host))
            await trio.sleep(1)
        await trio.sleep(130)

    for host in busy:
        assert starts.least_share(host, since=5.0, until=130.0) >= 1 / (2 * len(busy))


async def test_a_caller_with_a_thousand_runs_takes_one_share(autojump_clock: MockClock) -> None:
    world, starts = a_world(capacity=10, think_s=2.0)
    many, one = hosts(2)
    for _ in range(1_000):
        await world.submit(urls(3, many), caller=CallerId(many))
    await world.submit(urls(600, one), caller=CallerId(one))

    async with world.working():
        await trio.sleep(70)

    shares = Counter(host for _, host in starts.begun)
    assert shares[one] >= sum(shares.values()) * 0.4
    assert starts.least_share(one, since=1.0, until=70.0) >= 1 / 4


async def _seconds_of_ten(*, beside: int) -> float:
    """How long ten tasks take while so many tasks of another caller are already being fetched."""
    world, _ = a_world(capacity=20, think_s=2.0)
    async with world.working():
        if beside:
            await world.submit(urls(beside, "large.example.com"), caller=CallerId("large"))
        await trio.sleep(9.5)
        began_at = trio.current_time()
        small = await world.submit(urls(10, "small.example.com"), caller=CallerId("small"))
        await world.wait_for_end(small)
        return trio.current_time() - began_at


async def test_a_small_job_beside_a_huge_one_takes_at_most_twice_its_time(
    autojump_clock: MockClock,
) -> None:
    alone_s = await _seconds_of_ten(beside=0)
    # A poller receives only a few messages at a time, so this list acts like one of a million.
    beside_s = await _seconds_of_ten(beside=9_000)

    assert beside_s <= 2 * alone_s


@dataclass(slots=True)
class Silent:
    """A gateway whose hosts named `silent` do not answer within a minute; other hosts answer at
    once."""

    interrupted_count: int = 0

    def price(self, params: Mapping[str, str]) -> Price:
        return Price()

    async def scrape(self, request: ScrapeRequest) -> Outcome:
        if "silent" not in request.url:
            await trio.sleep(0.5)
            return a_page()
        try:
            await trio.sleep(60.0)
        except trio.Cancelled:
            self.interrupted_count += 1
            raise
        return a_page()


@pytest.mark.parametrize(("capacity", "callers_count"), [(100, 1), (100, 40), (100, 100)])
async def test_a_small_job_ends_soon_beside_callers_whose_pages_never_answer(
    capacity: int, callers_count: int, autojump_clock: MockClock
) -> None:
    gateway = Silent()
    world = replace(make_world(capacity=capacity), gateway=gateway)  # type: ignore[arg-type]

    async with world.working():
        for number in range(callers_count):
            caller = CallerId(f"attacker-{number}")
            await world.submit(urls(40, "silent.example.com"), caller=caller)
        await trio.sleep(20)
        began_at = trio.current_time()
        small = await world.submit(urls(10, "small.example.com"), caller=CallerId("small"))
        await world.wait_for_end(small)
        took_s = trio.current_time() - began_at

    assert took_s <= 2 * 0.5 + 5.0
    assert gateway.interrupted_count or callers_count == 1
