"""The mailbox: bounds, asking, draining."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.runtime import (
    Address,
    AskTimedOut,
    Inbox,
    Mailbox,
    MailboxFull,
    Reply,
    drain_nowait,
    receive_batch,
)


@dataclass(frozen=True, slots=True)
class Double:
    number: int
    reply: Reply[int]


async def double(inbox: Inbox[Double]) -> None:
    async for message in inbox:
        message.reply.send(message.number * 2)


async def test_messages_are_read_in_the_order_in_which_they_were_sent() -> None:
    mailbox = Mailbox[str](capacity=4)

    await mailbox.address.tell("first")
    mailbox.address.tell_nowait("second")

    assert drain_nowait(mailbox.open_inbox(), 10) == ["first", "second"]


def test_a_mailbox_must_hold_at_least_one_message() -> None:
    with pytest.raises(AssertionError):
        Mailbox[str](capacity=0)


async def test_tell_waits_while_the_mailbox_is_full(nursery: trio.Nursery) -> None:
    mailbox = Mailbox[str](capacity=1)
    mailbox.address.tell_nowait("first")

    nursery.start_soon(mailbox.address.tell, "second")
    await wait_all_tasks_blocked()

    assert mailbox.statistics().tasks_waiting_to_tell == 1
    inbox = mailbox.open_inbox()
    assert await inbox.receive() == "first"
    assert await inbox.receive() == "second"


async def test_tell_nowait_raises_an_error_with_the_message_if_the_mailbox_is_full() -> None:
    mailbox = Mailbox[str](capacity=1)
    mailbox.address.tell_nowait("first")

    with pytest.raises(MailboxFull, match="no room for str: all 1 places are taken"):
        mailbox.address.tell_nowait("second")

    assert mailbox.statistics().depth == 1


async def test_statistics_give_depth_and_capacity() -> None:
    mailbox = Mailbox[int](capacity=8)

    mailbox.address.tell_nowait(1)
    mailbox.address.tell_nowait(2)

    assert (mailbox.statistics().depth, mailbox.statistics().capacity) == (2, 8)


async def test_ask_returns_the_answer(nursery: trio.Nursery) -> None:
    mailbox = Mailbox[Double](capacity=1)
    nursery.start_soon(double, mailbox.open_inbox())

    answer: int = await mailbox.address.ask(lambda reply: Double(21, reply), deadline_s=1.0)

    assert answer == 42


async def test_ask_gives_up_at_its_deadline(autojump_clock: MockClock) -> None:
    mailbox = Mailbox[Double](capacity=1)
    asked_at = trio.current_time()

    with pytest.raises(AskTimedOut):
        await mailbox.address.ask(lambda reply: Double(1, reply), deadline_s=3.0)

    assert trio.current_time() - asked_at == pytest.approx(3.0)


async def test_the_deadline_covers_the_wait_for_room(autojump_clock: MockClock) -> None:
    mailbox = Mailbox[Double](capacity=1)
    mailbox.address.tell_nowait(Double(0, Reply()))
    asked_at = trio.current_time()

    with pytest.raises(AskTimedOut):
        await mailbox.address.ask(lambda reply: Double(1, reply), deadline_s=3.0)

    assert trio.current_time() - asked_at == pytest.approx(3.0)
    assert mailbox.statistics().depth == 1


async def test_an_answer_at_the_same_time_as_the_deadline_counts(autojump_clock: MockClock) -> None:
    mailbox = Mailbox[Double](capacity=1)

    def answered(reply: Reply[int]) -> Double:
        reply.send(7)
        return Double(1, reply)

    assert await mailbox.address.ask(answered, deadline_s=0.0) == 7


async def test_only_the_first_answer_counts() -> None:
    reply: Reply[int] = Reply()

    reply.send(1)
    reply.send(2)

    assert reply.result() == 1


async def test_a_reply_after_the_deadline_of_the_ask_is_harmless(autojump_clock: MockClock) -> None:
    mailbox = Mailbox[Double](capacity=1)
    with pytest.raises(AskTimedOut):
        await mailbox.address.ask(lambda reply: Double(1, reply), deadline_s=1.0)

    (late,) = drain_nowait(mailbox.open_inbox(), 1)
    late.reply.send(2)

    assert late.reply.is_answered


async def test_drain_takes_no_more_than_its_limit() -> None:
    mailbox = Mailbox[int](capacity=8)
    for number in range(5):
        mailbox.address.tell_nowait(number)

    taken = drain_nowait(mailbox.open_inbox(), 3)

    assert taken == [0, 1, 2]
    assert mailbox.statistics().depth == 2


async def test_drain_of_an_empty_mailbox_is_empty() -> None:
    assert drain_nowait(Mailbox[int](capacity=1).open_inbox(), 3) == []


async def test_a_batch_waits_for_its_first_message_and_then_takes_all_waiting_ones(
    nursery: trio.Nursery,
) -> None:
    mailbox = Mailbox[int](capacity=8)
    batches: list[list[int]] = []

    async def read_one_batch() -> None:
        batches.append(await receive_batch(mailbox.open_inbox(), 3))

    nursery.start_soon(read_one_batch)
    await wait_all_tasks_blocked()
    for number in range(5):
        mailbox.address.tell_nowait(number)
    await wait_all_tasks_blocked()

    assert batches == [[0, 1, 2]]


async def test_unread_messages_stay_in_the_mailbox_when_an_inbox_is_closed() -> None:
    mailbox = Mailbox[int](capacity=8)
    mailbox.address.tell_nowait(1)
    mailbox.address.tell_nowait(2)

    with mailbox.open_inbox() as inbox:
        in_hand = inbox.receive_nowait()
    mailbox.address.tell_nowait(3)

    assert in_hand == 1
    assert drain_nowait(mailbox.open_inbox(), 10) == [2, 3]


async def test_an_address_accepts_a_sender_of_one_of_its_message_types() -> None:
    mailbox = Mailbox[int | str](capacity=1)

    # The annotation is the assertion: mypy rejects it unless addresses are contravariant.
    narrow: Address[int] = mailbox.address
    narrow.tell_nowait(1)

    assert mailbox.statistics().depth == 1
