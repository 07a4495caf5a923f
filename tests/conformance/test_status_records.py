"""The laws of status texts: one per owner and subject, for a limited time."""

from __future__ import annotations

from conveyor.domain import limits
from conveyor.ports.coordinator import Coordinator
from tests.builders import JOB, RUN, ManualClock


async def test_a_status_text_exists_until_its_owner_puts_another_on_the_subject(
    coordinator: Coordinator,
) -> None:
    await coordinator.put_status("b", {"run": "b1", "workers": "here"}, ttl_s=30)
    await coordinator.put_status("a", {"run": "a1"}, ttl_s=30)
    await coordinator.put_status("b", {"run": "b2"}, ttl_s=30)

    assert await coordinator.list_status("run") == ["a1", "b2"]
    assert await coordinator.list_status("workers") == ["here"]
    assert await coordinator.list_status("nothing") == []


async def test_a_status_text_ends_after_its_time(
    coordinator: Coordinator, clock: ManualClock
) -> None:
    await coordinator.put_status("a", {"run": "a1"}, ttl_s=30)
    clock.advance(20)
    await coordinator.put_status("b", {"run": "b1"}, ttl_s=30)

    clock.advance(9.9)
    before = await coordinator.list_status("run")
    clock.advance(0.1)

    assert before == ["a1", "b1"]
    assert await coordinator.list_status("run") == ["b1"]


async def test_a_status_text_with_no_lifetime_withdraws_the_previous_one(
    coordinator: Coordinator,
) -> None:
    await coordinator.put_status("a", {"run": "a1"}, ttl_s=30)

    await coordinator.put_status("a", {"run": ""}, ttl_s=0)

    assert await coordinator.list_status("run") == []


async def test_a_status_text_and_a_lease_can_live_as_long_as_a_gateway_call(
    coordinator: Coordinator,
) -> None:
    ttl_s = limits.SCRAPE_DEADLINE_S
    await coordinator.put_status("a", {"run": "a1"}, ttl_s=ttl_s)
    leases = await coordinator.acquire(JOB, RUN, count_max=1, cap=1, ttl_s=limits.LEASE_TTL_S)
    await coordinator.renew(leases, ttl_s=ttl_s)

    assert await coordinator.list_status("run") == ["a1"]
    assert await coordinator.count(RUN) == 1
    assert await coordinator.acquire(JOB, RUN, count_max=1, cap=1, ttl_s=ttl_s) == []
