"""The laws of Queue about messages: at least once, one receipt that speaks
(docs/architecture.md, Discovery)."""

from __future__ import annotations

from collections import Counter

import trio

from conveyor.ports.queue import Depth, Message, Queue
from tests.builders import RUN, ManualClock, a_ref
from tests.conformance.queue.laws import EMPTY, given, refs_of, take


async def test_messages_come_oldest_first_and_no_more_than_asked_for(queue: Queue) -> None:
    await given(queue, a_ref(0), a_ref(1))
    await queue.send([a_ref(2), a_ref(3), a_ref(4)])

    pages = [await take(queue, count_max) for count_max in (2, 0, 2, 2, 2)]

    assert [refs_of(page) for page in pages] == [
        [a_ref(0), a_ref(1)],
        [],
        [a_ref(2), a_ref(3)],
        [a_ref(4)],
        [],
    ]


async def test_each_delivery_has_its_own_receipt_and_is_counted(
    queue: Queue, clock: ManualClock
) -> None:
    await given(queue, a_ref())

    deliveries = []
    for _ in range(3):
        deliveries += await take(queue, visibility_s=5)
        clock.advance(5)

    assert [message.receives for message in deliveries] == [1, 2, 3]
    assert len({message.receipt for message in deliveries}) == 3


async def test_a_message_that_is_neither_acked_nor_in_hand_can_be_received(
    queue: Queue, clock: ManualClock
) -> None:
    await given(queue, a_ref(0), a_ref(1), a_ref(2))
    [first, second] = await take(queue, count_max=2)
    await queue.ack([first])
    clock.advance(60)

    again = await take(queue)

    assert Counter(refs_of(again)) == Counter([second.ref, a_ref(2)])


async def test_an_acked_message_never_returns(queue: Queue, clock: ManualClock) -> None:
    await given(queue, a_ref(0), a_ref(1))
    await queue.ack(await take(queue))

    clock.advance(1_000_000)

    assert await take(queue) == []
    assert await queue.depth(RUN) == EMPTY


async def test_acking_again_is_fine(queue: Queue) -> None:
    await given(queue, a_ref(0), a_ref(1))
    [message] = await take(queue, count_max=1)

    await queue.ack([message])
    await queue.ack([message, message])

    assert await queue.depth(RUN) == Depth(visible=1, hidden=0)


async def test_a_received_message_stays_hidden_for_its_time_then_returns_by_itself(
    queue: Queue, clock: ManualClock
) -> None:
    await given(queue, a_ref())
    await take(queue, visibility_s=60)

    clock.advance(59.5)
    early = await take(queue)
    clock.advance(0.5)
    late = await take(queue)

    assert early == []
    assert [(message.ref, message.receives) for message in late] == [(a_ref(), 2)]


async def test_a_message_is_in_one_hand_at_a_time(queue: Queue) -> None:
    await given(queue, *(a_ref(index) for index in range(40)))
    received: list[Message] = []

    async def work() -> None:
        while messages := await take(queue, count_max=3):
            received.extend(messages)

    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(work)

    assert Counter(refs_of(received)) == Counter(a_ref(index) for index in range(40))


async def test_the_latest_receipt_acks_even_after_its_time(
    queue: Queue, clock: ManualClock
) -> None:
    await given(queue, a_ref(0), a_ref(1))
    [first, _second] = await take(queue, visibility_s=60)
    clock.advance(61)

    await queue.ack([first])

    assert await queue.depth(RUN) == Depth(visible=1, hidden=0)


async def test_an_extension_after_its_time_holds_unless_it_is_answered_as_lost(
    queue: Queue, clock: ManualClock
) -> None:
    await given(queue, a_ref())
    [message] = await take(queue, visibility_s=60)
    clock.advance(61)

    lost = await queue.extend([message], visibility_s=60)

    assert await queue.depth(RUN) == Depth(visible=len(lost), hidden=1 - len(lost))


async def test_acking_with_an_older_receipt_changes_nothing(
    queue: Queue, clock: ManualClock
) -> None:
    await given(queue, a_ref())
    [old] = await take(queue)
    clock.advance(60)
    [new] = await take(queue)

    await queue.ack([old])

    assert await queue.depth(RUN) == Depth(visible=0, hidden=1)
    assert await queue.extend([new], visibility_s=60) == frozenset()


async def test_bouncing_with_an_older_receipt_changes_nothing(
    queue: Queue, clock: ManualClock
) -> None:
    await given(queue, a_ref())
    [old] = await take(queue)
    clock.advance(60)
    await take(queue, visibility_s=60)

    await queue.bounce([old], delay_s=0)

    assert await take(queue) == []
    clock.advance(60)
    assert refs_of(await take(queue)) == [a_ref()]


async def test_extending_with_an_older_receipt_changes_nothing_and_says_so(
    queue: Queue, clock: ManualClock
) -> None:
    await given(queue, a_ref())
    [old] = await take(queue)
    clock.advance(60)
    await take(queue, visibility_s=10)

    lost = await queue.extend([old], visibility_s=1000)

    assert lost == frozenset({old.receipt})
    clock.advance(10)
    assert refs_of(await take(queue)) == [a_ref()]


async def test_extending_keeps_messages_hidden_for_longer_from_now(
    queue: Queue, clock: ManualClock
) -> None:
    await given(queue, a_ref(0), a_ref(1))
    messages = await take(queue, visibility_s=60)
    clock.advance(50)

    lost = await queue.extend(messages, visibility_s=60)

    assert lost == frozenset()
    clock.advance(59.5)
    assert await take(queue) == []
    clock.advance(0.5)
    assert len(await take(queue)) == 2


async def test_extending_answers_exactly_the_receipts_that_no_longer_speak(
    queue: Queue, clock: ManualClock
) -> None:
    await given(queue, a_ref(0), a_ref(1), a_ref(2))
    [acked, overtaken, held] = await take(queue, visibility_s=60)
    await queue.ack([acked])
    await queue.bounce([overtaken], delay_s=0)
    await take(queue)

    lost = await queue.extend([acked, overtaken, held], visibility_s=60)

    assert lost == frozenset({acked.receipt, overtaken.receipt})


async def test_a_bounced_message_is_visible_again_after_its_delay(
    queue: Queue, clock: ManualClock
) -> None:
    await given(queue, a_ref())
    await queue.bounce(await take(queue, visibility_s=60), delay_s=5)

    clock.advance(4.5)
    early = await take(queue)
    clock.advance(0.5)
    late = await take(queue)

    assert early == []
    assert refs_of(late) == [a_ref()]


async def test_a_bounced_message_may_wait_longer_than_it_was_hidden(
    queue: Queue, clock: ManualClock
) -> None:
    await given(queue, a_ref())
    await queue.bounce(await take(queue, visibility_s=60), delay_s=300)

    clock.advance(299)

    assert await take(queue) == []
    assert await queue.depth(RUN) == Depth(visible=0, hidden=1)


async def test_a_bounced_message_is_the_same_message_and_not_a_new_one(queue: Queue) -> None:
    await given(queue, a_ref())

    for _ in range(3):
        await queue.bounce(await take(queue), delay_s=0)

    assert await queue.depth(RUN) == Depth(visible=1, hidden=0)
    [message] = await take(queue)
    assert (message.ref, message.receives) == (a_ref(), 4)


async def test_a_bounced_message_queues_up_behind_those_that_were_visible_before_it(
    queue: Queue, clock: ManualClock
) -> None:
    await given(queue, a_ref(0), a_ref(1))
    await queue.bounce(await take(queue, count_max=1), delay_s=5)
    clock.advance(5)
    await queue.send([a_ref(2)])

    messages = await take(queue)

    assert messages[0].ref == a_ref(1)
    assert Counter(refs_of(messages)) == Counter([a_ref(0), a_ref(1), a_ref(2)])


async def test_the_same_ref_sent_twice_is_two_messages(queue: Queue) -> None:
    await given(queue, a_ref(), a_ref())
    [first] = await take(queue, count_max=1)

    await queue.ack([first])

    assert refs_of(await take(queue)) == [a_ref()]
