"""Tests each fault of the model of SQS."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock

from conveyor.domain.ids import TaskId
from conveyor.domain.model import TaskRef
from conveyor.engines.aws.errors import AwsError, NoResponse
from conveyor.engines.aws.sqs import RUN_ATTRIBUTES
from conveyor.simulation.models.fault_rates import SqsFaults
from conveyor.simulation.models.sqs import URL
from tests.builders import JOB, RUN, a_ulid
from tests.simulation.models.worlds import World

QUEUE = {"QueueUrl": f"{URL}q"}


async def a_queue(world: World, *bodies: str) -> None:
    await world.sqs("CreateQueue", QueueName="q", Attributes=RUN_ATTRIBUTES)
    for body in bodies:
        await world.sqs("SendMessage", **QUEUE, MessageBody=body)


async def receive(world: World, count: int = 10, **more: Any) -> list[Any]:
    answer = await world.sqs("ReceiveMessage", **QUEUE, MaxNumberOfMessages=count, **more)
    messages: list[Any] = answer.get("Messages", [])
    return messages


async def delete(world: World, *messages: Any) -> Any:
    receipts = [message["ReceiptHandle"] for message in messages]
    entries = [{"Id": str(n), "ReceiptHandle": receipt} for n, receipt in enumerate(receipts)]
    return await world.sqs("DeleteMessageBatch", **QUEUE, Entries=entries)


def bodies(messages: list[Any]) -> list[str]:
    return [message["Body"] for message in messages]


async def test_a_message_may_be_delivered_twice(world: World) -> None:
    await a_queue(world, "a")
    world.set_faults(SqsFaults(duplicate_rate=1.0))

    assert bodies([*await receive(world), *await receive(world)]) == ["a", "a"]
    assert world.fault_source.fault_counts["sqs.duplicate"] == 2


async def test_a_deleted_message_may_be_delivered_once_more(
    world: World, autojump_clock: MockClock
) -> None:
    await a_queue(world, "a")
    messages = await receive(world)
    world.set_faults(SqsFaults(undead_rate=1.0))

    answer = await delete(world, *messages)
    world.clear_faults()
    await trio.sleep(60)

    assert answer["Failed"] == []
    assert bodies(await receive(world)) == ["a"]
    assert world.fault_source.fault_counts["sqs.undead"] == 1


async def test_messages_may_be_delivered_out_of_order(world: World) -> None:
    sent = [str(number) for number in range(10)]
    await a_queue(world, *sent)
    world.set_faults(SqsFaults(reordered_rate=1.0))

    received = bodies(await receive(world))

    assert received != sent
    assert sorted(received) == sent


async def test_a_receive_may_be_empty_although_there_are_messages(world: World) -> None:
    await a_queue(world, "a")
    world.set_faults(SqsFaults(false_empty_rate=1.0))

    empty = await receive(world)
    world.clear_faults()

    assert [empty, bodies(await receive(world))] == [[], ["a"]]
    assert world.fault_source.fault_counts["sqs.false_empty"] == 1


async def test_a_lost_receive_hides_its_messages_until_their_visibility_timeout(
    world: World, autojump_clock: MockClock
) -> None:
    await a_queue(world, "a")
    world.set_faults(SqsFaults(lost_receive_rate=1.0))

    with pytest.raises(NoResponse):
        await receive(world, VisibilityTimeout=30)
    world.clear_faults()

    assert await receive(world) == []
    await trio.sleep(30)
    [message] = await receive(world)
    assert message["Attributes"]["ApproximateReceiveCount"] == "2"


async def test_a_stale_receipt_is_accepted_without_effect(
    world: World, autojump_clock: MockClock
) -> None:
    await a_queue(world, "a")
    old = await receive(world, VisibilityTimeout=1)
    await trio.sleep(1)
    world.set_faults(SqsFaults(stale_receipt_rate=1.0))

    lapsed = await delete(world, *old)
    new = await receive(world, VisibilityTimeout=1)
    superseded = await delete(world, *old)
    await trio.sleep(1)

    assert len(lapsed["Successful"]) == len(superseded["Successful"]) == 1
    assert bodies(await receive(world)) == bodies(new) == ["a"]
    assert world.fault_source.fault_counts["sqs.stale_receipt"] == 2


async def test_visibility_timeouts_vary_by_a_tenth(world: World, autojump_clock: MockClock) -> None:
    await a_queue(world, *map(str, range(10)))
    world.set_faults(SqsFaults(visibility_drift=0.1))
    await receive(world, VisibilityTimeout=100)

    counts = []
    for wait_s in (89, 11, 11):
        await trio.sleep(wait_s)
        counts.append(len(await receive(world, VisibilityTimeout=1000)))

    assert counts[0] == 0
    assert 0 < counts[1] < 10
    assert sum(counts) == 10


async def test_a_new_queue_may_be_invisible_for_two_seconds(
    world: World, autojump_clock: MockClock
) -> None:
    world.set_faults(SqsFaults(unseen_rate=1.0, unseen_s=(2.0, 2.0)))

    await world.sqs("CreateQueue", QueueName="q", Attributes=RUN_ATTRIBUTES)
    with pytest.raises(AwsError, match="QueueDoesNotExist"):
        await world.sqs("SendMessage", **QUEUE, MessageBody="a")
    await trio.sleep(2)

    await world.sqs("SendMessage", **QUEUE, MessageBody="a")


async def test_a_removed_queue_may_accept_and_lose_sends_for_a_minute(
    world: World, autojump_clock: MockClock
) -> None:
    await a_queue(world)
    world.set_faults(SqsFaults(ghost_rate=1.0, ghost_s=(60.0, 60.0)))
    await world.sqs("DeleteQueue", **QUEUE)

    await world.sqs("SendMessage", **QUEUE, MessageBody="a")
    with pytest.raises(AwsError, match="QueueDeletedRecently"):
        await a_queue(world)
    await trio.sleep(60)
    with pytest.raises(AwsError, match="QueueDoesNotExist"):
        await world.sqs("SendMessage", **QUEUE, MessageBody="a")

    await a_queue(world)
    assert await receive(world) == []


async def test_a_receive_beyond_the_limit_of_messages_in_flight_is_refused(world: World) -> None:
    await a_queue(world, *map(str, range(12)))
    world.set_faults(SqsFaults(in_flight_max=10))
    await receive(world)

    with pytest.raises(AwsError, match="OverLimit"):
        await receive(world)
    assert world.fault_source.fault_counts["sqs.over_limit"] == 1


async def test_messages_expire_after_the_retention_time(
    world: World, autojump_clock: MockClock
) -> None:
    await a_queue(world, "a")
    world.set_faults(SqsFaults(retention_s_max=100.0))
    await trio.sleep(101)

    assert await receive(world) == []
    assert world.fault_source.fault_counts["sqs.retention"] == 1


async def test_a_part_of_a_batch_may_be_accepted(world: World) -> None:
    await a_queue(world)
    world.set_faults(SqsFaults(partial_batch_rate=0.5))
    entries = [{"Id": str(number), "MessageBody": str(number)} for number in range(10)]

    answer = await world.sqs("SendMessageBatch", **QUEUE, Entries=entries)
    world.clear_faults()

    taken = {entry["Id"] for entry in answer["Successful"]}
    assert 0 < len(taken) < 10
    assert len(answer["Failed"]) == 10 - len(taken)
    assert {*bodies(await receive(world))} == taken


async def test_a_long_poll_ends_with_the_first_message(
    world: World, autojump_clock: MockClock
) -> None:
    await a_queue(world)
    start = trio.current_time()
    polls: list[tuple[float, list[str]]] = []

    async def listen() -> None:
        messages = await receive(world, WaitTimeSeconds=20)
        polls.append((trio.current_time() - start, bodies(messages)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(listen)
        await trio.sleep(5)
        await world.sqs("SendMessage", **QUEUE, MessageBody="a")
    await listen()

    assert polls == [(5.0, ["a"]), (25.0, [])]


async def test_a_message_that_is_never_deleted_is_moved_to_the_dead_letter_queue(
    world: World, autojump_clock: MockClock
) -> None:
    control = {"QueueUrl": f"{URL}conveyor-control"}
    dead = {"QueueUrl": f"{URL}conveyor-control-dead"}
    await world.sqs("SendMessage", **control, MessageBody="a")

    for _ in range(6):
        await world.sqs("ReceiveMessage", **control, VisibilityTimeout=1)
        await trio.sleep(1)

    assert bodies((await world.sqs("ReceiveMessage", **dead))["Messages"]) == ["a"]


async def test_foreign_messages_on_a_run_queue_are_discarded(world: World) -> None:
    queue = (await world.engine()).queue
    await queue.open_run(RUN)
    world.set_faults(SqsFaults(garbage_rate=1.0))
    refs = [TaskRef(JOB, RUN, TaskId(a_ulid(number)), 0) for number in range(20)]

    await queue.send(refs)
    messages = []
    for _ in range(5):
        messages += await queue.receive(RUN, count_max=10, visibility_s=60)

    assert world.fault_source.fault_counts["sqs.garbage"] >= 20
    assert {message.ref for message in messages} == set(refs)
    left = await queue.depth(RUN)
    assert (left.visible, left.hidden) <= (
        0,
        25,
    )  # Messages that another release may have sent stay.
