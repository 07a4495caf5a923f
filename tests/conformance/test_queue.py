"""The laws of Queue: at least once, one receipt that speaks, a queue per run (SPEC 6.1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from conveyor.domain.model import TaskRef
from conveyor.ports.errors import QueueGone
from conveyor.ports.queue import Depth, Message, Queue
from tests.builders import OTHER_RUN, RUN, ManualClock, a_ref
from tests.conformance.queues import QUEUES, TIMELESS

EMPTY = Depth(visible=0, hidden=0)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Where only real time passes, the laws that need time to pass are left to the others."""
    names = QUEUES if "clock" in metafunc.fixturenames else [*QUEUES, *TIMELESS]
    metafunc.parametrize("queue", sorted(names), indirect=True)


@pytest.fixture
async def queue(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Queue]:
    if request.param in TIMELESS:
        async with TIMELESS[request.param](request.getfixturevalue("localstack")) as queue:
            yield queue
    else:
        clock = request.getfixturevalue("clock")
        async with QUEUES[request.param](tmp_path, clock) as queue:
            yield queue


async def _given(queue: Queue, *refs: TaskRef) -> None:
    await queue.open_run(RUN)
    await queue.send(refs)


async def _take(queue: Queue, count_max: int = 10, visibility_s: float = 60) -> list[Message]:
    return await queue.receive(RUN, count_max=count_max, visibility_s=visibility_s)


def _refs(messages: list[Message]) -> list[TaskRef]:
    return [message.ref for message in messages]


async def test_messages_come_oldest_first_and_no_more_than_asked_for(queue: Queue) -> None:
    await _given(queue, a_ref(0), a_ref(1))
    await queue.send([a_ref(2), a_ref(3), a_ref(4)])

    pages = [await _take(queue, count_max) for count_max in (2, 0, 2, 2, 2)]

    assert [_refs(page) for page in pages] == [
        [a_ref(0), a_ref(1)],
        [],
        [a_ref(2), a_ref(3)],
        [a_ref(4)],
        [],
    ]


async def test_each_delivery_has_its_own_receipt_and_is_counted(
    queue: Queue, clock: ManualClock
) -> None:
    await _given(queue, a_ref())

    deliveries = []
    for _ in range(3):
        deliveries += await _take(queue, visibility_s=5)
        clock.advance(5)

    assert [message.receives for message in deliveries] == [1, 2, 3]
    assert len({message.receipt for message in deliveries}) == 3


async def test_a_message_that_is_neither_acked_nor_in_hand_can_be_received(
    queue: Queue, clock: ManualClock
) -> None:
    await _given(queue, a_ref(0), a_ref(1), a_ref(2))
    [first, second] = await _take(queue, count_max=2)
    await queue.ack([first])
    clock.advance(60)

    again = await _take(queue)

    assert Counter(_refs(again)) == Counter([second.ref, a_ref(2)])


async def test_an_acked_message_never_returns(queue: Queue, clock: ManualClock) -> None:
    await _given(queue, a_ref(0), a_ref(1))
    await queue.ack(await _take(queue))

    clock.advance(1_000_000)

    assert await _take(queue) == []
    assert await queue.depth(RUN) == EMPTY


async def test_acking_again_is_fine(queue: Queue) -> None:
    await _given(queue, a_ref(0), a_ref(1))
    [message] = await _take(queue, count_max=1)

    await queue.ack([message])
    await queue.ack([message, message])

    assert await queue.depth(RUN) == Depth(visible=1, hidden=0)


async def test_a_received_message_stays_hidden_for_its_time_then_returns_by_itself(
    queue: Queue, clock: ManualClock
) -> None:
    await _given(queue, a_ref())
    await _take(queue, visibility_s=60)

    clock.advance(59.5)
    early = await _take(queue)
    clock.advance(0.5)
    late = await _take(queue)

    assert early == []
    assert [(message.ref, message.receives) for message in late] == [(a_ref(), 2)]


async def test_a_message_is_in_one_hand_at_a_time(queue: Queue) -> None:
    await _given(queue, *(a_ref(index) for index in range(40)))
    received: list[Message] = []

    async def work() -> None:
        while messages := await _take(queue, count_max=3):
            received.extend(messages)

    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(work)

    assert Counter(_refs(received)) == Counter(a_ref(index) for index in range(40))


async def test_the_latest_receipt_acks_even_after_its_time(
    queue: Queue, clock: ManualClock
) -> None:
    await _given(queue, a_ref(0), a_ref(1))
    [first, _second] = await _take(queue, visibility_s=60)
    clock.advance(61)

    await queue.ack([first])

    assert await queue.depth(RUN) == Depth(visible=1, hidden=0)


async def test_an_extension_after_its_time_holds_unless_it_is_answered_as_lost(
    queue: Queue, clock: ManualClock
) -> None:
    await _given(queue, a_ref())
    [message] = await _take(queue, visibility_s=60)
    clock.advance(61)

    lost = await queue.extend([message], visibility_s=60)

    assert await queue.depth(RUN) == Depth(visible=len(lost), hidden=1 - len(lost))


async def test_acking_with_an_older_receipt_changes_nothing(
    queue: Queue, clock: ManualClock
) -> None:
    await _given(queue, a_ref())
    [old] = await _take(queue)
    clock.advance(60)
    [new] = await _take(queue)

    await queue.ack([old])

    assert await queue.depth(RUN) == Depth(visible=0, hidden=1)
    assert await queue.extend([new], visibility_s=60) == frozenset()


async def test_bouncing_with_an_older_receipt_changes_nothing(
    queue: Queue, clock: ManualClock
) -> None:
    await _given(queue, a_ref())
    [old] = await _take(queue)
    clock.advance(60)
    await _take(queue, visibility_s=60)

    await queue.bounce([old], delay_s=0)

    assert await _take(queue) == []
    clock.advance(60)
    assert _refs(await _take(queue)) == [a_ref()]


async def test_extending_with_an_older_receipt_changes_nothing_and_says_so(
    queue: Queue, clock: ManualClock
) -> None:
    await _given(queue, a_ref())
    [old] = await _take(queue)
    clock.advance(60)
    await _take(queue, visibility_s=10)

    lost = await queue.extend([old], visibility_s=1000)

    assert lost == frozenset({old.receipt})
    clock.advance(10)
    assert _refs(await _take(queue)) == [a_ref()]


async def test_extending_keeps_messages_hidden_for_longer_from_now(
    queue: Queue, clock: ManualClock
) -> None:
    await _given(queue, a_ref(0), a_ref(1))
    messages = await _take(queue, visibility_s=60)
    clock.advance(50)

    lost = await queue.extend(messages, visibility_s=60)

    assert lost == frozenset()
    clock.advance(59.5)
    assert await _take(queue) == []
    clock.advance(0.5)
    assert len(await _take(queue)) == 2


async def test_extending_answers_exactly_the_receipts_that_no_longer_speak(
    queue: Queue, clock: ManualClock
) -> None:
    await _given(queue, a_ref(0), a_ref(1), a_ref(2))
    [acked, overtaken, held] = await _take(queue, visibility_s=60)
    await queue.ack([acked])
    await queue.bounce([overtaken], delay_s=0)
    await _take(queue)

    lost = await queue.extend([acked, overtaken, held], visibility_s=60)

    assert lost == frozenset({acked.receipt, overtaken.receipt})


async def test_a_bounced_message_is_visible_again_after_its_delay(
    queue: Queue, clock: ManualClock
) -> None:
    await _given(queue, a_ref())
    await queue.bounce(await _take(queue, visibility_s=60), delay_s=5)

    clock.advance(4.5)
    early = await _take(queue)
    clock.advance(0.5)
    late = await _take(queue)

    assert early == []
    assert _refs(late) == [a_ref()]


async def test_a_bounced_message_may_wait_longer_than_it_was_hidden(
    queue: Queue, clock: ManualClock
) -> None:
    await _given(queue, a_ref())
    await queue.bounce(await _take(queue, visibility_s=60), delay_s=300)

    clock.advance(299)

    assert await _take(queue) == []
    assert await queue.depth(RUN) == Depth(visible=0, hidden=1)


async def test_a_bounced_message_is_the_same_message_and_not_a_new_one(queue: Queue) -> None:
    await _given(queue, a_ref())

    for _ in range(3):
        await queue.bounce(await _take(queue), delay_s=0)

    assert await queue.depth(RUN) == Depth(visible=1, hidden=0)
    [message] = await _take(queue)
    assert (message.ref, message.receives) == (a_ref(), 4)


async def test_a_bounced_message_queues_up_behind_those_that_were_visible_before_it(
    queue: Queue, clock: ManualClock
) -> None:
    await _given(queue, a_ref(0), a_ref(1))
    await queue.bounce(await _take(queue, count_max=1), delay_s=5)
    clock.advance(5)
    await queue.send([a_ref(2)])

    messages = await _take(queue)

    assert messages[0].ref == a_ref(1)
    assert Counter(_refs(messages)) == Counter([a_ref(0), a_ref(1), a_ref(2)])


async def test_the_same_ref_sent_twice_is_two_messages(queue: Queue) -> None:
    await _given(queue, a_ref(), a_ref())
    [first] = await _take(queue, count_max=1)

    await queue.ack([first])

    assert _refs(await _take(queue)) == [a_ref()]


async def test_queues_of_different_runs_share_nothing(queue: Queue) -> None:
    await queue.open_run(RUN)
    await queue.open_run(OTHER_RUN)
    await queue.send([a_ref(0), a_ref(1, OTHER_RUN), a_ref(2)])

    here = await _take(queue)
    await queue.close_run(RUN)

    assert _refs(here) == [a_ref(0), a_ref(2)]
    assert await queue.depth(OTHER_RUN) == Depth(visible=1, hidden=0)
    there = await queue.receive(OTHER_RUN, count_max=10, visibility_s=60)
    assert _refs(there) == [a_ref(1, OTHER_RUN)]


async def test_making_a_queue_again_is_fine_and_keeps_its_messages(queue: Queue) -> None:
    await _given(queue, a_ref())

    await queue.open_run(RUN)

    assert await queue.depth(RUN) == Depth(visible=1, hidden=0)


async def test_removing_a_queue_removes_whatever_is_on_it(queue: Queue, clock: ManualClock) -> None:
    await _given(queue, a_ref(0), a_ref(1))
    await _take(queue, count_max=1)

    await queue.close_run(RUN)

    assert await queue.depth(RUN) == EMPTY
    clock.advance(60)
    await queue.open_run(RUN)
    assert await _take(queue) == []


async def test_removing_a_queue_again_is_fine(queue: Queue) -> None:
    await _given(queue, a_ref())

    await queue.close_run(RUN)
    await queue.close_run(RUN)

    assert await queue.depth(RUN) == EMPTY


async def test_receipts_of_a_removed_queue_no_longer_speak(
    queue: Queue, clock: ManualClock
) -> None:
    await _given(queue, a_ref(0))
    [old] = await _take(queue, visibility_s=1000)
    await queue.close_run(RUN)
    clock.advance(60)
    await _given(queue, a_ref(1))
    await _take(queue, visibility_s=60)

    lost = await queue.extend([old], visibility_s=60)
    await queue.bounce([old], delay_s=0)
    await queue.ack([old])

    assert lost == frozenset({old.receipt})
    assert await queue.depth(RUN) == Depth(visible=0, hidden=1)


async def test_sending_to_a_queue_that_is_gone_says_so(queue: Queue) -> None:
    with pytest.raises(QueueGone):
        await queue.send([a_ref()])

    await _given(queue)
    await queue.close_run(RUN)
    with pytest.raises(QueueGone):
        await queue.send([a_ref()])
    assert await queue.depth(RUN) == EMPTY


async def test_receiving_from_a_queue_that_is_gone_says_so(queue: Queue) -> None:
    with pytest.raises(QueueGone):
        await _take(queue)

    await _given(queue)
    await queue.close_run(RUN)
    with pytest.raises(QueueGone):
        await _take(queue)


async def test_an_empty_queue_is_not_gone(queue: Queue) -> None:
    await _given(queue)

    assert await _take(queue) == []


async def test_sending_nothing_is_fine(queue: Queue) -> None:
    await queue.send([])

    assert await queue.depth(RUN) == EMPTY


async def test_depth_tells_visible_messages_from_hidden_ones(
    queue: Queue, clock: ManualClock
) -> None:
    await _given(queue, *(a_ref(index) for index in range(5)))
    [bounced, acked, _held] = await _take(queue, count_max=3, visibility_s=60)
    await queue.bounce([bounced], delay_s=5)
    await queue.ack([acked])

    depths = [await queue.depth(RUN)]
    for seconds in (5, 55):
        clock.advance(seconds)
        depths.append(await queue.depth(RUN))

    assert depths == [
        Depth(visible=2, hidden=2),
        Depth(visible=3, hidden=1),
        Depth(visible=4, hidden=0),
    ]


async def test_the_depth_of_a_queue_that_is_gone_is_zero(queue: Queue) -> None:
    assert await queue.depth(RUN) == EMPTY
