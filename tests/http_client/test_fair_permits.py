"""Permits are shared among callers: no caller holds all, and the caller with the least use is
served first."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.domain.submit.target import TargetPolicy
from conveyor.http_client.errors import NameNotResolved
from conveyor.http_client.fair_permits import ACCOUNTS_MAX, Bounds, FairPermits
from conveyor.http_client.resolver import LOOKUPS, SLOW_LOOKUPS_MAX, Resolver
from tests.http_client.conftest import target


async def test_a_caller_never_holds_more_than_its_share() -> None:
    shares = FairPermits(Bounds.fixed(8, 2))

    assert [shares.acquire_nowait("a") for _ in range(3)] == [True, True, False]
    assert shares.acquire_nowait("b")
    shares.release("a")
    assert shares.acquire_nowait("a")
    assert shares.free_count == 5


async def test_the_caller_with_the_least_use_is_served_first(
    autojump_clock: trio.testing.MockClock,
) -> None:
    shares = FairPermits(Bounds.fixed(1, 1))
    served: list[str] = []

    async def use(caller: str) -> None:
        await shares.acquire(caller)
        served.append(caller)
        shares.release(caller)

    for caller, used_s in (("greedy", 50.0), ("modest", 3.0)):
        assert shares.acquire_nowait(caller)
        shares.release(caller, used_s)
    assert shares.acquire_nowait("holder")
    async with trio.open_nursery() as nursery:
        for caller in ("greedy", "modest", "new"):
            nursery.start_soon(use, caller)
            await trio.testing.wait_all_tasks_blocked()
        shares.release("holder")

    assert served == ["new", "modest", "greedy"]


async def test_past_use_is_forgotten_over_time(autojump_clock: trio.testing.MockClock) -> None:
    shares = FairPermits(Bounds.fixed(1, 1))
    assert shares.acquire_nowait("once greedy")
    shares.release("once greedy", 100.0)
    await trio.sleep(600)

    served: list[str] = []

    async def use(caller: str) -> None:
        await shares.acquire(caller)
        served.append(caller)
        shares.release(caller)

    assert shares.acquire_nowait("holder")
    async with trio.open_nursery() as nursery:
        for caller in ("once greedy", "new"):
            nursery.start_soon(use, caller)
            await trio.testing.wait_all_tasks_blocked()
        shares.release("holder")

    assert served == ["once greedy", "new"]


async def test_a_share_shrinks_with_slow_uses_and_grows_with_quick_ones() -> None:
    shares = FairPermits(Bounds(total=64, initial=8, min=2, max=10))

    def holds() -> int:
        count = 0
        while shares.acquire_nowait("a"):
            count += 1
        return count

    assert holds() == 8
    shares.release("a", is_slow=True)
    shares.release("a", is_slow=True)
    shares.release("a", is_slow=True)
    for _ in range(5):
        shares.release("a")
    assert holds() == 2
    for _ in range(2):
        shares.release("a", is_slow=False)
    assert holds() == 4
    for _ in range(4):
        shares.release("a")
    for _ in range(9):
        assert shares.acquire_nowait("a")
        shares.release("a", is_slow=False)
    assert holds() == 10


async def test_contention_is_reported_when_others_hold_what_a_caller_may_have() -> None:
    answers: list[bool] = []
    shares = FairPermits(
        Bounds.fixed(2, 2), on_contention=lambda: answers.append(shares.is_contended)
    )
    async with trio.open_nursery() as nursery:
        for _ in range(2):
            assert shares.acquire_nowait("a")
        nursery.start_soon(shares.acquire, "a")
        await trio.testing.wait_all_tasks_blocked()
        assert answers == []
        assert not shares.is_contended
        nursery.start_soon(shares.acquire, "b")
        await trio.testing.wait_all_tasks_blocked()
        assert answers == [True]
        nursery.cancel_scope.cancel()

    assert not shares.is_contended


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=30),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_no_permit_is_lost_or_duplicated_whatever_is_cancelled(
    uses: list[tuple[str, bool]], total: int, per_caller: int
) -> None:
    async def main() -> None:
        shares = FairPermits(Bounds.fixed(total, per_caller))
        held = dict.fromkeys("abc", 0)

        async def use(caller: str, is_cancelled: bool) -> None:
            with trio.CancelScope() as scope:
                if is_cancelled:
                    scope.cancel()
                await shares.acquire(caller)
                held[caller] += 1
                assert held[caller] <= per_caller
                assert sum(held.values()) <= total
                try:
                    await trio.lowlevel.checkpoint()
                finally:
                    held[caller] -= 1
                    shares.release(caller)

        async with trio.open_nursery() as nursery:
            for caller, is_cancelled in uses:
                nursery.start_soon(use, caller, is_cancelled)
        assert shares.free_count == total

    trio.run(main)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5), st.booleans()), max_size=30),
    st.integers(5, 12),
)
def test_uses_of_several_permits_all_end_and_stay_within_the_total(
    uses: list[tuple[str, int, bool]], total: int
) -> None:
    async def main() -> None:
        shares = FairPermits(Bounds.fixed(total, 5))
        held = dict.fromkeys("abc", 0)

        async def use(caller: str, count: int, is_cancelled: bool) -> None:
            with trio.CancelScope() as scope:
                if is_cancelled:
                    scope.cancel()
                await shares.acquire(caller, count)
                held[caller] += count
                assert held[caller] <= 5
                assert sum(held.values()) <= total
                try:
                    await trio.lowlevel.checkpoint()
                finally:
                    held[caller] -= count
                    shares.release(caller, count=count)

        async with trio.open_nursery() as nursery:
            for caller, count, is_cancelled in uses:
                nursery.start_soon(use, caller, count, is_cancelled)
        assert shares.free_count == total

    trio.run(main)


async def test_small_uses_cannot_delay_a_large_one_without_end() -> None:
    shares = FairPermits(Bounds.fixed(4, 4))
    served: list[str] = []

    async def use(caller: str, count: int) -> None:
        await shares.acquire(caller, count)
        served.append(caller)

    for _ in range(4):
        assert shares.acquire_nowait("holder")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(use, "large", 3)
        await trio.testing.wait_all_tasks_blocked()
        shares.release("holder", 5.0)
        nursery.start_soon(use, "small", 1)
        await trio.testing.wait_all_tasks_blocked()
        assert not shares.acquire_nowait("small")
        shares.release("holder", 5.0, count=2)
        await trio.testing.wait_all_tasks_blocked()
        assert served == ["large"]
        shares.release("holder", 5.0)

    assert served == ["large", "small"]


async def test_a_cancelled_large_use_lets_smaller_ones_proceed() -> None:
    shares = FairPermits(Bounds.fixed(2, 2))
    assert shares.acquire_nowait("holder")
    async with trio.open_nursery() as nursery, trio.open_nursery() as large:
        large.start_soon(shares.acquire, "large", 2)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(shares.acquire, "small", 1)
        await trio.testing.wait_all_tasks_blocked()
        large.cancel_scope.cancel()

    assert shares.free_count == 0


async def test_idle_callers_are_forgotten() -> None:
    shares = FairPermits(Bounds.fixed(1, 1))
    for number in range(ACCOUNTS_MAX + 50):
        assert shares.acquire_nowait(f"caller {number}")
        shares.release(f"caller {number}", 1.0)

    assert len(shares._accounts) == ACCOUNTS_MAX


class NameServers:
    """Name servers that answer quickly, except for names that contain `silent`; counts the lookups
    in progress."""

    def __init__(self) -> None:
        self.busy_count = 0
        self.busy_count_max = 0

    async def __call__(self, host: str) -> Sequence[str]:
        self.busy_count += 1
        self.busy_count_max = max(self.busy_count, self.busy_count_max)
        try:
            await trio.sleep(20.0 if "silent" in host else 0.01)
        finally:
            self.busy_count -= 1
        return ["93.184.216.34"]


@pytest.mark.parametrize("attackers_count", [1, 40])
async def test_names_with_unresponsive_servers_do_not_delay_the_names_of_another_caller(
    attackers_count: int, autojump_clock: trio.testing.MockClock
) -> None:
    servers = NameServers()
    resolver = Resolver(TargetPolicy(), servers)

    async def attack(number: int) -> None:
        for attempt in count():
            with pytest.raises(NameNotResolved):
                await resolver.resolve(
                    target(f"http://silent-{number}-{attempt}.example.com/"),
                    f"attacker-{number % attackers_count}",
                )

    async def ask(number: int) -> None:
        await resolver.resolve(target(f"http://v{number}.example.com/"), "victim")

    async with trio.open_nursery() as attack_nursery:
        for number in range(200):
            attack_nursery.start_soon(attack, number)
        await trio.sleep(60)
        begun_at = trio.current_time()
        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(ask, number)
        victim_s = trio.current_time() - begun_at
        attack_nursery.cancel_scope.cancel()

    assert victim_s < 5.0
    assert servers.busy_count_max <= LOOKUPS.total + SLOW_LOOKUPS_MAX


async def test_a_lookup_is_waited_for_five_seconds_and_its_late_answer_is_cached(
    autojump_clock: trio.testing.MockClock,
) -> None:
    resolver = Resolver(TargetPolicy(), NameServers())
    name = target("http://silent.example.com/")

    for waited_s in (5.0, 0.0):
        begun_at = trio.current_time()
        with pytest.raises(NameNotResolved) as caught:
            await resolver.resolve(name)
        assert caught.value.is_temporary
        assert trio.current_time() - begun_at == pytest.approx(waited_s)
    await trio.sleep(16)

    assert await resolver.resolve(name) == ("93.184.216.34",)


async def test_a_name_queued_by_another_caller_is_looked_up_at_once(
    autojump_clock: trio.testing.MockClock,
) -> None:
    resolver = Resolver(TargetPolicy(), NameServers())
    async with trio.open_nursery() as nursery:
        for number in range(LOOKUPS.initial):
            nursery.start_soon(expect_unresolved, resolver, f"silent-{number}")
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(resolver.resolve, target("http://wanted.example.com/"), "attacker")
        await trio.testing.wait_all_tasks_blocked()
        begun_at = trio.current_time()
        await resolver.resolve(target("http://wanted.example.com/"), "victim")
        assert trio.current_time() - begun_at < 0.1


async def expect_unresolved(resolver: Resolver, name: str) -> None:
    with pytest.raises(NameNotResolved):
        await resolver.resolve(target(f"http://{name}.example.com/"), "attacker")
