"""What may happen to any call: refused, lost, slow, stalled, and done after its caller gave up."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from conveyor.engines.aws.errors import AwsError, NoResponse
from conveyor.ports.errors import Unavailable
from conveyor.simulation.models.fault_rates import CallFaults
from tests.simulation.models.worlds import TABLE, World, item, key

A = item("a", text="x")


async def there(world: World) -> bool:
    world.heals()
    return "Item" in await world.dynamodb("GetItem", TableName=TABLE, Key=key("a"))


async def test_a_refused_call_has_no_effect(world: World, autojump_clock: MockClock) -> None:
    world.suffers(CallFaults(refused_rate=1.0))

    with pytest.raises((AwsError, NoResponse)):
        await world.dynamodb("PutItem", TableName=TABLE, Item=A)

    assert not await there(world)
    assert world.fault_source.fired["call.refused"] == 1


async def test_a_lost_answer_is_of_a_call_that_was_done(
    world: World, autojump_clock: MockClock
) -> None:
    world.suffers(CallFaults(lost_rate=1.0))

    with pytest.raises((AwsError, NoResponse)):
        await world.dynamodb("PutItem", TableName=TABLE, Item=A)

    assert await there(world)
    assert world.fault_source.fired["call.lost"] == 1


async def test_a_slow_call_takes_its_time_and_is_done(
    world: World, autojump_clock: MockClock
) -> None:
    world.suffers(CallFaults(slow_rate=1.0, slow_s=(5.0, 5.0)))
    start = trio.current_time()

    await world.dynamodb("PutItem", TableName=TABLE, Item=A)

    assert trio.current_time() - start == pytest.approx(5.0)
    assert await there(world)
    assert world.fault_source.fired["call.slow"] == 1


async def test_a_stalled_call_is_done_and_never_answered(
    world: World, autojump_clock: MockClock
) -> None:
    world.suffers(CallFaults(stalled_rate=1.0))
    start = trio.current_time()

    with pytest.raises(NoResponse) as caught:
        await world.dynamodb("PutItem", TableName=TABLE, Item=A)

    assert caught.value.was_sent
    assert trio.current_time() - start == pytest.approx(10.0)
    assert await there(world)
    assert world.fault_source.fired["call.stalled"] == 1


async def test_a_late_call_is_done_after_its_caller_gave_up(
    world: World, autojump_clock: MockClock
) -> None:
    world.suffers(CallFaults(late_rate=1.0, late_s=(5.0, 5.0)))

    with pytest.raises(NoResponse):
        await world.dynamodb("PutItem", TableName=TABLE, Item=A)

    assert not await there(world)
    await trio.sleep(5.0)
    assert await there(world)
    assert world.fault_source.fired["call.late"] == 1


async def test_a_request_under_way_is_done_though_its_caller_is_cancelled(
    world: World, autojump_clock: MockClock
) -> None:
    world.suffers(CallFaults(latency_s=(4.0, 4.0)))

    with trio.move_on_after(1.0):
        await world.dynamodb("PutItem", TableName=TABLE, Item=A)

    assert not await there(world)
    await trio.sleep(1.0)
    assert await there(world)


async def test_through_the_client_a_lost_answer_is_unknown_or_made_good(
    world: World, autojump_clock: MockClock
) -> None:
    world.suffers(CallFaults(lost_rate=1.0))
    client = world.client()
    guarded = {"TableName": TABLE, "Item": A, "ConditionExpression": "attribute_not_exists(pk)"}

    with pytest.raises(Unavailable):
        await client.call("dynamodb", "PutItem", guarded)

    assert world.fault_source.fired["call.lost"] == 1
    with pytest.raises(Unavailable):
        await client.call("dynamodb", "GetItem", {"TableName": TABLE, "Key": key("a")})
    assert world.fault_source.fired["call.lost"] > 2


def test_the_same_seed_is_the_same_world() -> None:
    async def told(seed: int) -> list[str]:
        world = World(seed)
        await world.set_up()
        world.suffers(CallFaults(refused_rate=0.3, lost_rate=0.3, slow_rate=0.3))
        heard = []
        for number in range(50):
            try:
                await world.dynamodb("PutItem", TableName=TABLE, Item=item(str(number)))
            except (AwsError, NoResponse) as error:
                heard.append(str(error))
            heard.append(str(trio.current_time()))
        return heard

    first, again, other = (
        trio.run(told, seed, clock=MockClock(autojump_threshold=0)) for seed in (7, 7, 8)
    )

    assert first == again
    assert first != other
