"""Mailbox: bounded, typed messages for one actor, and the addresses for its senders.

Rules:
1. The supervisor keeps the mailbox; each incarnation reads from a clone of its receive end. So
   unread messages survive a crash, and the messages in progress are lost.
2. A mailbox never closes. Sending to an actor that is down waits or fails for lack of room, but is
   not an error of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import trio

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)
R = TypeVar("R")

Inbox: TypeAlias = trio.MemoryReceiveChannel[T]


class MailboxFull(Exception):
    """`tell_nowait` found no room."""


class AskTimedOut(Exception):
    """The deadline of an `ask` passed before the actor replied."""


@dataclass(frozen=True, slots=True)
class MailboxStatistics:
    depth: int
    capacity: int
    tasks_waiting_to_tell: int


class Reply(Generic[R]):
    """A single answer that travels inside a message."""

    __slots__ = ("_answered", "_answers")

    def __init__(self) -> None:
        self._answered = trio.Event()
        self._answers: list[R] = []

    def send(self, answer: R) -> None:
        """Answers. Never blocks. Only the first answer counts; a later one has no effect."""
        # An actor that crashes answers its open messages again, so a second answer is normal.
        if not self._answers:
            self._answers.append(answer)
            self._answered.set()

    @property
    def is_answered(self) -> bool:
        return bool(self._answers)

    def result(self) -> R:
        assert self._answers, "not answered yet"
        return self._answers[0]

    async def wait_answered(self) -> None:
        await self._answered.wait()


@dataclass(frozen=True, slots=True)
class Address(Generic[T_contra]):
    """Where to send messages for one actor, whichever incarnation reads them."""

    _send: trio.MemorySendChannel[T_contra]

    async def tell(self, message: T_contra) -> None:
        """Sends a message and waits for room. Await this only downstream: two actors that wait for
        room in each other's mailboxes would deadlock."""
        await self._send.send(message)

    async def tell_without_checkpoint(self, message: T_contra) -> None:
        """Like `tell`, but without a checkpoint if there is room. For the hottest paths."""
        try:
            self._send.send_nowait(message)
        except trio.WouldBlock:
            await self._send.send(message)

    def tell_nowait(self, message: T_contra) -> None:
        """Sends a message or raises `MailboxFull`."""
        try:
            self._send.send_nowait(message)
        except trio.WouldBlock:
            capacity = self._send.statistics().max_buffer_size
            kind = type(message).__name__
            raise MailboxFull(f"no room for {kind}: all {capacity} places are taken") from None

    async def ask(self, make_message: Callable[[Reply[R]], T_contra], *, deadline_s: float) -> R:
        """Sends a question and returns its answer. Raises `AskTimedOut` after `deadline_s`.

        The deadline includes the wait for room, because a full mailbox delays the answer too.
        """
        reply: Reply[R] = Reply()
        with trio.move_on_after(deadline_s):
            await self.tell(make_message(reply))
            await reply.wait_answered()
        # Checked after the scope: an answer that arrives together with the deadline still counts.
        if not reply.is_answered:
            raise AskTimedOut(f"no answer within {deadline_s} s")
        return reply.result()


class Mailbox(Generic[T]):
    """Bounded messages for one actor. The capacity is always written where the mailbox is
    created."""

    __slots__ = ("_receive", "_send", "address", "capacity")

    def __init__(self, *, capacity: int) -> None:
        assert capacity >= 1, "a mailbox holds at least one message"
        self.capacity = capacity
        self._send, self._receive = trio.open_memory_channel[T](capacity)
        self.address: Address[T] = Address(self._send)

    def open_inbox(self) -> Inbox[T]:
        """Returns a new receive end for one incarnation. Closing it does not remove messages."""
        return self._receive.clone()

    def statistics(self) -> MailboxStatistics:
        channel = self._receive.statistics()
        return MailboxStatistics(
            depth=channel.current_buffer_used,
            capacity=self.capacity,
            tasks_waiting_to_tell=channel.tasks_waiting_send,
        )


def drain_nowait(inbox: Inbox[T], limit: int) -> list[T]:
    """Takes up to `limit` messages that have already arrived."""
    messages: list[T] = []
    while len(messages) < limit:
        try:
            messages.append(inbox.receive_nowait())
        except (trio.WouldBlock, trio.EndOfChannel):
            break
    return messages


async def receive_batch(inbox: Inbox[T], limit: int) -> list[T]:
    """Waits for one message, then takes further ones that have arrived: at least one, at most
    `limit`."""
    assert limit >= 1
    first = await inbox.receive()
    return [first, *drain_nowait(inbox, limit - 1)]
