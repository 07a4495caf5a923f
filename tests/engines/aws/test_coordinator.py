"""Leases on DynamoDB: the clocks of those who share them are not quite the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass, field
from random import Random

import pytest

from conveyor.engines.aws.client.client import ATTEMPTS_MAX, Answer, AwsClient, Params
from conveyor.engines.aws.client.service_clock import ServiceClock
from conveyor.engines.aws.coordinator import SKEW_S, DynamoCoordinator
from conveyor.engines.aws.errors import AwsError
from conveyor.ports.coordinator import HostPool
from tests.aws import an_access, an_aws_client, an_http_transport
from tests.builders import JOB, RUN, ManualClock
from tests.conformance.coordinators import a_space, a_table_of_leases

pytestmark = pytest.mark.slow


@dataclass(slots=True)
class CountingClient:
    """An AwsClient that counts calls by operation."""

    client: AwsClient
    calls: Counter[str] = field(default_factory=Counter)

    async def call(
        self, service: str, operation: str, params: Params, *, attempts_max: int = ATTEMPTS_MAX
    ) -> Answer:
        self.calls[operation] += 1
        return await self.client.call(service, operation, params, attempts_max=attempts_max)

    def open(
        self, service: str, operation: str, params: Params
    ) -> AbstractAsyncContextManager[Answer]:
        return self.client.open(service, operation, params)


@pytest.fixture
async def client(ministack: str) -> AsyncIterator[AwsClient]:
    async with an_http_transport(an_access(dynamodb=ministack)) as transport:
        yield an_aws_client(transport)


async def test_a_process_whose_clock_is_ahead_does_not_take_a_lease_that_its_holder_can_renew(
    client: AwsClient,
) -> None:
    table = a_space()
    await client.call("dynamodb", "CreateTable", a_table_of_leases(table))
    clock, fast = ManualClock(), ManualClock()
    fast.advance(SKEW_S)
    holder = DynamoCoordinator(client, table, clock=clock, random=Random(1))
    other = DynamoCoordinator(client, table, clock=fast, random=Random(2))
    [held] = await holder.acquire(JOB, RUN, count_max=1, cap=1, ttl_s=30)

    for process_clock in (clock, fast):
        process_clock.advance(29.9)
    assert await other.acquire(JOB, RUN, count_max=1, cap=1, ttl_s=30) == []
    assert await holder.renew([held], ttl_s=30) == frozenset()

    for process_clock in (clock, fast):
        process_clock.advance(30)
    assert len(await other.acquire(JOB, RUN, count_max=1, cap=1, ttl_s=30)) == 1
    assert await holder.renew([held], ttl_s=30) == frozenset({held})


async def test_a_renewal_that_arrives_late_shortens_no_lease(client: AwsClient) -> None:
    """Its holder had given it up, and renewed since."""
    table = a_space()
    await client.call("dynamodb", "CreateTable", a_table_of_leases(table))
    clock, sent_before = ManualClock(), ManualClock()
    holder = DynamoCoordinator(client, table, clock=clock, random=Random(1))
    late = DynamoCoordinator(client, table, clock=sent_before, random=Random(1))
    [held] = await holder.acquire(JOB, RUN, count_max=1, cap=1, ttl_s=30)
    clock.advance(20)
    assert await holder.renew([held], ttl_s=30) == frozenset()

    assert await late.renew([held], ttl_s=30) == frozenset()

    clock.advance(20)
    assert await holder.count(RUN) == 1
    assert await holder.renew([held], ttl_s=30) == frozenset()


async def test_a_withdrawn_status_text_is_not_listed_by_a_process_whose_clock_is_behind(
    client: AwsClient,
) -> None:
    table = a_space()
    await client.call("dynamodb", "CreateTable", a_table_of_leases(table))
    clock, slow = ManualClock(), ManualClock()
    clock.advance(SKEW_S)
    owner = DynamoCoordinator(client, table, clock=clock, random=Random(1))
    reader = DynamoCoordinator(client, table, clock=slow, random=Random(2))
    await owner.put_status("owner", {"workers": "here"}, ttl_s=30)
    assert await reader.list_status("workers") == ["here"]

    await owner.put_status("owner", {"workers": ""}, ttl_s=0)

    assert await reader.list_status("workers") == []


DAY_S = 86_400.0


@pytest.mark.parametrize("step_s", [-40 * DAY_S, -DAY_S, -3_600.0, 3_600.0, DAY_S, 40 * DAY_S])
async def test_a_clock_that_is_set_hides_no_lease_of_a_worker_and_frees_none(
    ministack: str, step_s: float
) -> None:
    """A stop would tell its caller that no fetch is open (SPEC.md 4.13), whether the clock of the
    worker was set or that of the process that counts."""
    table, machines = a_space(), [ManualClock(), ManualClock()]
    async with AsyncExitStack() as stack:
        holder, other = [
            await _open_coordinator(stack, ministack, table, machine) for machine in machines
        ]
        [held] = await holder.acquire(JOB, RUN, count_max=1, cap=1, ttl_s=30)

        machines[0].step(step_s)
        assert await holder.renew([held], ttl_s=30) == frozenset()
        assert await other.count(RUN) == 1
        machines[1].step(step_s)

        assert await other.count(RUN) == 1
        assert await other.acquire(JOB, RUN, count_max=1, cap=1, ttl_s=30) == []
        assert await holder.renew([held], ttl_s=30) == frozenset()


async def _open_coordinator(
    stack: AsyncExitStack, server: str, table: str, machine: ManualClock
) -> DynamoCoordinator:
    """The coordinator of a process on a machine of its own."""
    transport = await stack.enter_async_context(an_http_transport(an_access(dynamodb=server)))
    transport.service_clock = ServiceClock(machine)
    client = an_aws_client(transport)
    with suppress(AwsError):  # The other process made the table.
        await client.call("dynamodb", "CreateTable", a_table_of_leases(table))
    return DynamoCoordinator(client, table, clock=transport.service_clock, random=Random(1))


async def test_one_search_finds_the_room_for_all_pages_of_a_host(client: AwsClient) -> None:
    table = a_space()
    await client.call("dynamodb", "CreateTable", a_table_of_leases(table))
    counting = CountingClient(client)
    coordinator = DynamoCoordinator(counting, table, clock=ManualClock(), random=Random(1))
    pools = [HostPool(JOB, "one.example.com", cap=3), HostPool(JOB, "other.example.com", cap=1)]

    leases = await coordinator.acquire_hosts([pools[0]] * 20 + [pools[1]] * 5, ttl_s=30)

    assert [lease is not None for lease in leases] == [True] * 3 + [False] * 17 + [True] + [
        False
    ] * 4
    assert counting.calls == {"Query": 2, "PutItem": 4}


async def test_an_acquire_of_free_leases_searches_once(client: AwsClient) -> None:
    table = a_space()
    await client.call("dynamodb", "CreateTable", a_table_of_leases(table))
    counting = CountingClient(client)
    coordinator = DynamoCoordinator(counting, table, clock=ManualClock(), random=Random(1))
    await coordinator.acquire(JOB, RUN, count_max=1, cap=10, ttl_s=30)
    counting.calls.clear()

    leases = await coordinator.acquire(JOB, RUN, count_max=5, cap=10, ttl_s=30)

    assert len(leases) == 5
    assert counting.calls == {"Query": 1, "PutItem": 5}
