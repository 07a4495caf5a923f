"""Tests the faults of any call: refused, lost, slow, stalled, and late."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from conveyor.engines.aws.errors import AwsError, NoResponse
from conveyor.ports.errors import Unavailable
from conveyor.simulation.models.fault_rates import CallFaults
from tests.simulation.models.worlds import TABLE, World, item, key

A = item("a", text="x")


async def is_stored(world: World) -> bool:
    world.clear_faults()
    return "Item" in await world.dynamodb("GetItem", TableName=TABLE, Key=key("a"))


async def test_a_refused_call_has_no_effect(world: World, autojump_clock: MockClock) -> None:
    world.set_faults(CallFaults(refused_rate=1.0))

    with pytest.raises((AwsError, NoResponse)):
        await world.dynamodb("PutItem", TableName=TABLE, Item=A)

    assert not await is_stored(world)
    assert world.fault_source.fault_counts["call.refused"] == 1


async def test_a_call_whose_answer_is_lost_has_its_effect(
    world: World, autojump_clock: MockClock
) -> None:
    world.set_faults(CallFaults(lost_rate=1.0))

    with pytest.raises((AwsError, NoResponse)):
        await world.dynamodb("PutItem", TableName=TABLE, Item=A)

    assert await is_stored(world)
    assert world.fault_source.fault_counts["call.lost"] == 1


async def test_a_slow_call_has_its_effect(world: World, autojump_clock: MockClock) -> None:
    world.set_faults(CallFaults(slow_rate=1.0, slow_s=(5.0, 5.0)))
    start = trio.current_time()

    await world.dynamodb("PutItem", TableName=TABLE, Item=A)

    assert trio.current_time() - start == pytest.approx(5.0)
    assert await is_stored(world)
    assert world.fault_source.fault_counts["call.slow"] == 1


async def test_a_stalled_call_has_its_effect_and_is_never_answered(
    world: World, autojump_clock: MockClock
) -> None:
    world.set_faults(CallFaults(stalled_rate=1.0))
    start = trio.current_time()

    with pytest.raises(NoResponse) as caught:
        await world.dynamodb("PutItem", TableName=TABLE, Item=A)

    assert caught.value.was_sent
    assert trio.current_time() - start == pytest.approx(10.0)
    assert await is_stored(world)
    assert world.fault_source.fault_counts["call.stalled"] == 1


async def test_a_late_call_has_its_effect_after_its_caller_gave_up(
    world: World, autojump_clock: MockClock
) -> None:
    world.set_faults(CallFaults(late_rate=1.0, late_s=(5.0, 5.0)))

    with pytest.raises(NoResponse):
        await world.dynamodb("PutItem", TableName=TABLE, Item=A)

    assert not await is_stored(world)
    await trio.sleep(5.0)
    assert await is_stored(world)
    assert world.fault_source.fault_counts["call.late"] == 1


async def test_a_request_in_progress_has_its_effect_if_its_caller_is_cancelled(
    world: World, autojump_clock: MockClock
) -> None:
    world.set_faults(CallFaults(latency_s=(4.0, 4.0)))

    with trio.move_on_after(1.0):
        await world.dynamodb("PutItem", TableName=TABLE, Item=A)

    assert not await is_stored(world)
    await trio.sleep(1.0)
    assert await is_stored(world)


async def test_the_client_reports_a_lost_answer_of_a_write_and_retries_a_read(
    world: World, autojump_clock: MockClock
) -> None:
    world.set_faults(CallFaults(lost_rate=1.0))
    client = world.client()
    guarded = {"TableName": TABLE, "Item": A, "ConditionExpression": "attribute_not_exists(pk)"}

    with pytest.raises(Unavailable):
        await client.call("dynamodb", "PutItem", guarded)

    assert world.fault_source.fault_counts["call.lost"] == 1
    with pytest.raises(Unavailable):
        await client.call("dynamodb", "GetItem", {"TableName": TABLE, "Key": key("a")})
    assert world.fault_source.fault_counts["call.lost"] > 2


def test_the_same_seed_gives_the_same_faults_at_the_same_times() -> None:
    async def collect_results(seed: int) -> list[str]:
        world = World(seed)
        await world.set_up()
        world.set_faults(CallFaults(refused_rate=0.3, lost_rate=0.3, slow_rate=0.3))
        results = []
        for number in range(50):
            try:
                await world.dynamodb("PutItem", TableName=TABLE, Item=item(str(number)))
            except (AwsError, NoResponse) as error:
                results.append(str(error))
            results.append(str(trio.current_time()))
        return results

    first, again, other = (
        trio.run(collect_results, seed, clock=MockClock(autojump_threshold=0)) for seed in (7, 7, 8)
    )

    assert first == again
    assert first != other
