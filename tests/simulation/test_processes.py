"""Tests that kills, pauses and outages of a process take effect at every service."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from conveyor.engines.aws.client.service_clock import ServiceClock
from conveyor.engines.aws.errors import NoResponse
from conveyor.simulation.backends.faulty_aws import FaultyRedis, FaultyTransport
from conveyor.simulation.faults.fault_injector import FaultInjector, Killed
from conveyor.simulation.faults.faults import Fault
from conveyor.simulation.models.sqs import URL
from tests.simulation.models.worlds import BUCKET, TABLE, World, item
from tests.simulation.processes import faults_of_process

AT = {"Bucket": BUCKET, "Key": "k"}


@pytest.fixture
async def world() -> World:
    world = World()
    await world.set_up()
    await world.sqs("CreateQueue", QueueName="q")
    await world.s3("PutObject", Key="k", Body=b"x")
    return world


def a_transport(world: World, injector: FaultInjector) -> FaultyTransport:
    return FaultyTransport(world.aws, injector, ServiceClock(world.clock))


@pytest.mark.parametrize(
    ("service", "operation", "params"),
    [
        ("dynamodb", "PutItem", {"TableName": TABLE, "Item": item("a")}),
        ("sqs", "SendMessage", {"QueueUrl": f"{URL}q", "MessageBody": "b"}),
        ("sqs", "ReceiveMessage", {"QueueUrl": f"{URL}q"}),
        ("s3", "PutObject", {**AT, "Body": b"y"}),
    ],
)
async def test_a_process_may_die_after_any_call(
    world: World, service: str, operation: str, params: dict[str, object]
) -> None:
    injector = faults_of_process(Fault.KILLED_AFTER)

    with pytest.raises(Killed):
        await a_transport(world, injector).call(service, operation, params, deadline_s=10.0)

    assert injector.is_dead


async def test_a_call_that_was_made_before_a_death_has_its_effect(world: World) -> None:
    transport = a_transport(world, faults_of_process(Fault.KILLED_AFTER))
    with pytest.raises(Killed):
        await transport.call(
            "sqs", "SendMessage", {"QueueUrl": f"{URL}q", "MessageBody": "b"}, deadline_s=10.0
        )

    assert [message.body for message in world.aws.sqs.queues[f"{URL}q"].messages.values()] == ["b"]


async def test_a_process_may_die_after_a_write_to_redis_but_not_after_a_read(
    world: World,
) -> None:
    injector = faults_of_process(Fault.KILLED_AFTER)
    link = FaultyRedis(world.redis.link(), injector, set())

    assert await link.get("k") is None
    with pytest.raises(Killed):
        await link.put("k", "v", ttl_s=10.0)

    assert await world.redis.link().get("k") == "v"


async def test_opening_a_body_fails_during_an_outage(world: World) -> None:
    injector = faults_of_process()
    injector.faults.begin_outage()

    with pytest.raises(NoResponse):
        async with a_transport(world, injector).open("s3", "GetObject", AT, deadline_s=10.0):
            pass


async def test_reading_a_body_fails_when_an_outage_begins(world: World) -> None:
    injector = faults_of_process()

    async with a_transport(world, injector).open("s3", "GetObject", AT, deadline_s=10.0) as got:
        injector.faults.begin_outage()
        with pytest.raises(NoResponse):
            await anext(got["Body"])


async def test_a_killed_process_does_not_continue_a_read(world: World) -> None:
    injector = faults_of_process()

    async with a_transport(world, injector).open("s3", "GetObject", AT, deadline_s=10.0) as got:
        injector.kill(Fault.KILLED_BEFORE)
        with pytest.raises(Killed):
            await anext(got["Body"])


async def test_a_paused_process_continues_its_read_when_it_resumes(
    world: World, autojump_clock: MockClock
) -> None:
    injector = faults_of_process()
    read: list[float] = []

    async def read_it() -> None:
        async with a_transport(world, injector).open("s3", "GetObject", AT, deadline_s=99.0) as got:
            assert [piece async for piece in got["Body"]] == [b"x"]
            read.append(trio.current_time())

    injector.pause()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read_it)
        await trio.sleep(30.0)
        injector.resume()

    assert read == [pytest.approx(30.0)]
