"""The laws of Queue about messages: delivery at least once, and one valid receipt per message
(docs/architecture.md, Discovery)."""

from __future__ import annotations

from collections import Counter

import trio

from conveyor.ports.queue import Depth, Message, Queue
from tests.builders import RUN, ManualClock, a_ref
from tests.conformance.queue.laws import EMPTY, open_and_send, receive, refs_of


async def test_messages_are_received_oldest_first_up_to_the_requested_count(queue: Queue) -> None:
    await open_and_send(queue, a_ref(0), a_ref(1))
    await queue.send([a_ref(2), a_ref(3), a_ref(4)])

    pages = [await receive(queue, count_max) for count_max in (2, 0, 2, 2, 2)]

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
    await open_and_send(queue, a_ref())

    deliveries = []
    for _ in range(3):
        deliveries += await receive(queue, visibility_s=5)
        clock.advance(5)

    assert [message.receives for message in deliveries] == [1, 2, 3]
    assert len({message.receipt for message in deliveries}) == 3


async def test_a_message_that_is_neither_acked_nor_hidden_can_be_received(
    queue: Queue, clock: ManualClock
) -> None:
    await open_and_send(queue, a_ref(0), a_ref(1), a_ref(2))
    [first, second] = await receive(queue, count_max=2)
    await queue.ack([first])
    clock.advance(60)

    again = await receive(queue)

    assert Counter(refs_of(again)) == Counter([second.ref, a_ref(2)])


async def test_an_acked_message_never_returns(queue: Queue, clock: ManualClock) -> None:
    await open_and_send(queue, a_ref(0), a_ref(1))
    await queue.ack(await receive(queue))

    clock.advance(1_000_000)

    assert await receive(queue) == []
    assert await queue.depth(RUN) == EMPTY


async def test_acking_a_removed_message_changes_nothing(queue: Queue) -> None:
    await open_and_send(queue, a_ref(0), a_ref(1))
    [message] = await receive(queue, count_max=1)

    await queue.ack([message])
    await queue.ack([message, message])

    assert await queue.depth(RUN) == Depth(visible=1, hidden=0)


async def test_a_received_message_stays_hidden_for_its_visibility_time_and_then_returns(
    queue: Queue, clock: ManualClock
) -> None:
    await open_and_send(queue, a_ref())
    await receive(queue, visibility_s=60)

    clock.advance(59.5)
    early = await receive(queue)
    clock.advance(0.5)
    late = await receive(queue)

    assert early == []
    assert [(message.ref, message.receives) for message in late] == [(a_ref(), 2)]


async def test_concurrent_receivers_never_get_the_same_message(queue: Queue) -> None:
    await open_and_send(queue, *(a_ref(index) for index in range(40)))
    received: list[Message] = []

    async def work() -> None:
        while messages := await receive(queue, count_max=3):
            received.extend(messages)

    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(work)

    assert Counter(refs_of(received)) == Counter(a_ref(index) for index in range(40))


async def test_the_latest_receipt_can_ack_after_its_visibility_time(
    queue: Queue, clock: ManualClock
) -> None:
    await open_and_send(queue, a_ref(0), a_ref(1))
    [first, _second] = await receive(queue, visibility_s=60)
    clock.advance(61)

    await queue.ack([first])

    assert await queue.depth(RUN) == Depth(visible=1, hidden=0)


async def test_a_late_extension_hides_the_message_unless_its_receipt_is_returned(
    queue: Queue, clock: ManualClock
) -> None:
    await open_and_send(queue, a_ref())
    [message] = await receive(queue, visibility_s=60)
    clock.advance(61)

    lost = await queue.extend([message], visibility_s=60)

    assert await queue.depth(RUN) == Depth(visible=len(lost), hidden=1 - len(lost))


async def test_an_ack_with_an_older_receipt_changes_nothing(
    queue: Queue, clock: ManualClock
) -> None:
    await open_and_send(queue, a_ref())
    [old] = await receive(queue)
    clock.advance(60)
    [new] = await receive(queue)

    await queue.ack([old])

    assert await queue.depth(RUN) == Depth(visible=0, hidden=1)
    assert await queue.extend([new], visibility_s=60) == frozenset()


async def test_a_bounce_with_an_older_receipt_changes_nothing(
    queue: Queue, clock: ManualClock
) -> None:
    await open_and_send(queue, a_ref())
    [old] = await receive(queue)
    clock.advance(60)
    await receive(queue, visibility_s=60)

    await queue.bounce([old], delay_s=0)

    assert await receive(queue) == []
    clock.advance(60)
    assert refs_of(await receive(queue)) == [a_ref()]


async def test_an_extension_with_an_older_receipt_changes_nothing_and_returns_the_receipt(
    queue: Queue, clock: ManualClock
) -> None:
    await open_and_send(queue, a_ref())
    [old] = await receive(queue)
    clock.advance(60)
    await receive(queue, visibility_s=10)

    lost = await queue.extend([old], visibility_s=1000)

    assert lost == frozenset({old.receipt})
    clock.advance(10)
    assert refs_of(await receive(queue)) == [a_ref()]


async def test_an_extension_hides_messages_for_its_time_from_now(
    queue: Queue, clock: ManualClock
) -> None:
    await open_and_send(queue, a_ref(0), a_ref(1))
    messages = await receive(queue, visibility_s=60)
    clock.advance(50)

    lost = await queue.extend(messages, visibility_s=60)

    assert lost == frozenset()
    clock.advance(59.5)
    assert await receive(queue) == []
    clock.advance(0.5)
    assert len(await receive(queue)) == 2


async def test_an_extension_returns_exactly_the_receipts_that_are_no_longer_valid(
    queue: Queue, clock: ManualClock
) -> None:
    await open_and_send(queue, a_ref(0), a_ref(1), a_ref(2))
    [acked, overtaken, held] = await receive(queue, visibility_s=60)
    await queue.ack([acked])
    await queue.bounce([overtaken], delay_s=0)
    await receive(queue)

    lost = await queue.extend([acked, overtaken, held], visibility_s=60)

    assert lost == frozenset({acked.receipt, overtaken.receipt})


async def test_a_bounced_message_is_visible_again_after_its_delay(
    queue: Queue, clock: ManualClock
) -> None:
    await open_and_send(queue, a_ref())
    await queue.bounce(await receive(queue, visibility_s=60), delay_s=5)

    clock.advance(4.5)
    early = await receive(queue)
    clock.advance(0.5)
    late = await receive(queue)

    assert early == []
    assert refs_of(late) == [a_ref()]


async def test_a_bounce_may_hide_a_message_for_longer_than_its_receive_did(
    queue: Queue, clock: ManualClock
) -> None:
    await open_and_send(queue, a_ref())
    await queue.bounce(await receive(queue, visibility_s=60), delay_s=300)

    clock.advance(299)

    assert await receive(queue) == []
    assert await queue.depth(RUN) == Depth(visible=0, hidden=1)


async def test_a_bounced_message_is_the_same_message_and_not_a_new_one(queue: Queue) -> None:
    await open_and_send(queue, a_ref())

    for _ in range(3):
        await queue.bounce(await receive(queue), delay_s=0)

    assert await queue.depth(RUN) == Depth(visible=1, hidden=0)
    [message] = await receive(queue)
    assert (message.ref, message.receives) == (a_ref(), 4)


async def test_a_bounced_message_is_received_after_those_that_were_visible_before_it(
    queue: Queue, clock: ManualClock
) -> None:
    await open_and_send(queue, a_ref(0), a_ref(1))
    await queue.bounce(await receive(queue, count_max=1), delay_s=5)
    clock.advance(5)
    await queue.send([a_ref(2)])

    messages = await receive(queue)

    assert messages[0].ref == a_ref(1)
    assert Counter(refs_of(messages)) == Counter([a_ref(0), a_ref(1), a_ref(2)])


async def test_a_reference_that_is_sent_twice_becomes_two_messages(queue: Queue) -> None:
    await open_and_send(queue, a_ref(), a_ref())
    [first] = await receive(queue, count_max=1)

    await queue.ack([first])

    assert refs_of(await receive(queue)) == [a_ref()]
