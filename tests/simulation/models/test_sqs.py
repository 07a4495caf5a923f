"""SQS's whims, each of which is really there."""

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


async def test_a_message_may_be_delivered_twice_at_once(world: World) -> None:
    await a_queue(world, "a")
    world.suffers(SqsFaults(duplicate_rate=1.0))

    assert bodies([*await receive(world), *await receive(world)]) == ["a", "a"]
    assert world.fault_source.fired["sqs.duplicate"] == 2


async def test_a_deleted_message_may_come_back_once_more(
    world: World, autojump_clock: MockClock
) -> None:
    await a_queue(world, "a")
    messages = await receive(world)
    world.suffers(SqsFaults(undead_rate=1.0))

    answer = await delete(world, *messages)
    world.heals()
    await trio.sleep(60)

    assert answer["Failed"] == []
    assert bodies(await receive(world)) == ["a"]
    assert world.fault_source.fired["sqs.undead"] == 1


async def test_messages_come_out_of_order(world: World) -> None:
    sent = [str(number) for number in range(10)]
    await a_queue(world, *sent)
    world.suffers(SqsFaults(reordered_rate=1.0))

    received = bodies(await receive(world))

    assert received != sent
    assert sorted(received) == sent


async def test_an_empty_answer_may_be_false(world: World) -> None:
    await a_queue(world, "a")
    world.suffers(SqsFaults(false_empty_rate=1.0))

    empty = await receive(world)
    world.heals()

    assert [empty, bodies(await receive(world))] == [[], ["a"]]
    assert world.fault_source.fired["sqs.false_empty"] == 1


async def test_a_lost_receive_hides_its_messages_until_their_time(
    world: World, autojump_clock: MockClock
) -> None:
    await a_queue(world, "a")
    world.suffers(SqsFaults(lost_receive_rate=1.0))

    with pytest.raises(NoResponse):
        await receive(world, VisibilityTimeout=30)
    world.heals()

    assert await receive(world) == []
    await trio.sleep(30)
    [message] = await receive(world)
    assert message["Attributes"]["ApproximateReceiveCount"] == "2"


async def test_a_stale_receipt_is_accepted_and_does_nothing(
    world: World, autojump_clock: MockClock
) -> None:
    await a_queue(world, "a")
    old = await receive(world, VisibilityTimeout=1)
    await trio.sleep(1)
    world.suffers(SqsFaults(stale_receipt_rate=1.0))

    lapsed = await delete(world, *old)
    new = await receive(world, VisibilityTimeout=1)
    superseded = await delete(world, *old)
    await trio.sleep(1)

    assert len(lapsed["Successful"]) == len(superseded["Successful"]) == 1
    assert bodies(await receive(world)) == bodies(new) == ["a"]
    assert world.fault_source.fired["sqs.stale_receipt"] == 2


async def test_visibility_is_kept_give_or_take(world: World, autojump_clock: MockClock) -> None:
    await a_queue(world, *map(str, range(10)))
    world.suffers(SqsFaults(visibility_drift=0.1))
    await receive(world, VisibilityTimeout=100)

    counts = []
    for wait_s in (89, 11, 11):
        await trio.sleep(wait_s)
        counts.append(len(await receive(world, VisibilityTimeout=1000)))

    assert counts[0] == 0
    assert 0 < counts[1] < 10
    assert sum(counts) == 10


async def test_a_new_queue_may_not_be_seen_for_two_seconds(
    world: World, autojump_clock: MockClock
) -> None:
    world.suffers(SqsFaults(unseen_rate=1.0, unseen_s=(2.0, 2.0)))

    await world.sqs("CreateQueue", QueueName="q", Attributes=RUN_ATTRIBUTES)
    with pytest.raises(AwsError, match="QueueDoesNotExist"):
        await world.sqs("SendMessage", **QUEUE, MessageBody="a")
    await trio.sleep(2)

    await world.sqs("SendMessage", **QUEUE, MessageBody="a")


async def test_a_removed_queue_may_take_sends_for_a_minute_and_keeps_none(
    world: World, autojump_clock: MockClock
) -> None:
    await a_queue(world)
    world.suffers(SqsFaults(ghost_rate=1.0, ghost_s=(60.0, 60.0)))
    await world.sqs("DeleteQueue", **QUEUE)

    await world.sqs("SendMessage", **QUEUE, MessageBody="a")
    with pytest.raises(AwsError, match="QueueDeletedRecently"):
        await a_queue(world)
    await trio.sleep(60)
    with pytest.raises(AwsError, match="QueueDoesNotExist"):
        await world.sqs("SendMessage", **QUEUE, MessageBody="a")

    await a_queue(world)
    assert await receive(world) == []


async def test_no_more_may_be_in_flight_than_the_limit(world: World) -> None:
    await a_queue(world, *map(str, range(12)))
    world.suffers(SqsFaults(in_flight_max=10))
    await receive(world)

    with pytest.raises(AwsError, match="OverLimit"):
        await receive(world)
    assert world.fault_source.fired["sqs.over_limit"] == 1


async def test_messages_go_when_they_are_too_old(world: World, autojump_clock: MockClock) -> None:
    await a_queue(world, "a")
    world.suffers(SqsFaults(retention_s_max=100.0))
    await trio.sleep(101)

    assert await receive(world) == []
    assert world.fault_source.fired["sqs.retention"] == 1


async def test_a_batch_may_be_taken_in_part(world: World) -> None:
    await a_queue(world)
    world.suffers(SqsFaults(partial_batch_rate=0.5))
    entries = [{"Id": str(number), "MessageBody": str(number)} for number in range(10)]

    answer = await world.sqs("SendMessageBatch", **QUEUE, Entries=entries)
    world.heals()

    taken = {entry["Id"] for entry in answer["Successful"]}
    assert 0 < len(taken) < 10
    assert len(answer["Failed"]) == 10 - len(taken)
    assert {*bodies(await receive(world))} == taken


async def test_a_long_poll_ends_with_the_first_message(
    world: World, autojump_clock: MockClock
) -> None:
    await a_queue(world)
    start = trio.current_time()
    heard: list[tuple[float, list[str]]] = []

    async def listen() -> None:
        messages = await receive(world, WaitTimeSeconds=20)
        heard.append((trio.current_time() - start, bodies(messages)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(listen)
        await trio.sleep(5)
        await world.sqs("SendMessage", **QUEUE, MessageBody="a")
    await listen()

    assert heard == [(5.0, ["a"]), (25.0, [])]


async def test_what_nobody_can_use_ends_up_on_the_dead_queue(
    world: World, autojump_clock: MockClock
) -> None:
    control = {"QueueUrl": f"{URL}conveyor-control"}
    dead = {"QueueUrl": f"{URL}conveyor-control-dead"}
    await world.sqs("SendMessage", **control, MessageBody="a")

    for _ in range(6):
        await world.sqs("ReceiveMessage", **control, VisibilityTimeout=1)
        await trio.sleep(1)

    assert bodies((await world.sqs("ReceiveMessage", **dead))["Messages"]) == ["a"]


async def test_what_others_send_to_a_queue_of_ours_is_put_away(world: World) -> None:
    queue = (await world.engine()).queue
    await queue.open_run(RUN)
    world.suffers(SqsFaults(garbage_rate=1.0))
    refs = [TaskRef(JOB, RUN, TaskId(a_ulid(number)), 0) for number in range(20)]

    await queue.send(refs)
    messages = []
    for _ in range(5):
        messages += await queue.receive(RUN, count_max=10, visibility_s=60)

    assert world.fault_source.fired["sqs.garbage"] >= 20
    assert {message.ref for message in messages} == set(refs)
    left = await queue.depth(RUN)
    assert (left.visible, left.hidden) <= (0, 25)  # What another release may have sent stays.
