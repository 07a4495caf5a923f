"""The mailbox: bounded, typed mail for one actor, and the addresses that senders are given.

Rules:
1. The supervisor's side keeps the mailbox; each incarnation reads from a clone of its receive
   end. Unread mail therefore survives a crash, and the message in hand is lost.
2. A mailbox never closes, so telling an actor that is down waits, or fails for want of room,
   but is never an error of its own.
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
    """The deadline of an `ask` passed before the actor answered."""


@dataclass(frozen=True, slots=True)
class MailboxStatistics:
    depth: int
    capacity: int
    tasks_waiting_to_tell: int


class Reply(Generic[R]):
    """A one-shot answer slip that travels inside a message."""

    __slots__ = ("_answered", "_answers")

    def __init__(self) -> None:
        self._answered = trio.Event()
        self._answers: list[R] = []

    def send(self, answer: R) -> None:
        """Answer. Never blocks; only the first answer counts, and a late one is harmless."""
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
    """Where to send mail for one actor, whichever incarnation reads it."""

    _send: trio.MemorySendChannel[T_contra]

    async def tell(self, message: T_contra) -> None:
        """Deliver a message, waiting for room. Only ever await this downstream."""
        await self._send.send(message)

    async def tell_without_checkpoint(self, message: T_contra) -> None:
        """Like `tell`, but does not give way when there is room: for the hottest paths."""
        try:
            self._send.send_nowait(message)
        except trio.WouldBlock:
            await self._send.send(message)

    def tell_nowait(self, message: T_contra) -> None:
        """Deliver a message or raise `MailboxFull`."""
        try:
            self._send.send_nowait(message)
        except trio.WouldBlock:
            capacity = self._send.statistics().max_buffer_size
            kind = type(message).__name__
            raise MailboxFull(f"no room for {kind}: all {capacity} places are taken") from None

    async def ask(self, make_message: Callable[[Reply[R]], T_contra], *, deadline_s: float) -> R:
        """Send a question and return its answer, or raise `AskTimedOut` after `deadline_s`.

        The deadline covers the wait for room too: a full mailbox is one more way of silence.
        """
        reply: Reply[R] = Reply()
        with trio.move_on_after(deadline_s):
            await self.tell(make_message(reply))
            await reply.wait_answered()
        # Looked at after the scope: an answer that ties with the deadline is still an answer.
        if not reply.is_answered:
            raise AskTimedOut(f"no answer within {deadline_s} s")
        return reply.result()


class Mailbox(Generic[T]):
    """Bounded mail for one actor. The capacity is always written where it is made."""

    __slots__ = ("_receive", "_send", "address", "capacity")

    def __init__(self, *, capacity: int) -> None:
        assert capacity >= 1, "a mailbox holds at least one message"
        self.capacity = capacity
        self._send, self._receive = trio.open_memory_channel[T](capacity)
        self.address: Address[T] = Address(self._send)

    def open_inbox(self) -> Inbox[T]:
        """A fresh receive end for one incarnation; closing it leaves the mail where it is."""
        return self._receive.clone()

    def statistics(self) -> MailboxStatistics:
        channel = self._receive.statistics()
        return MailboxStatistics(
            depth=channel.current_buffer_used,
            capacity=self.capacity,
            tasks_waiting_to_tell=channel.tasks_waiting_send,
        )


def drain_nowait(inbox: Inbox[T], limit: int) -> list[T]:
    """Take up to `limit` messages that are already there; all of them are then in hand."""
    messages: list[T] = []
    while len(messages) < limit:
        try:
            messages.append(inbox.receive_nowait())
        except (trio.WouldBlock, trio.EndOfChannel):
            break
    return messages


async def receive_batch(inbox: Inbox[T], limit: int) -> list[T]:
    """Wait for one message, then take what else is there: never empty, at most `limit`."""
    assert limit >= 1
    first = await inbox.receive()
    return [first, *drain_nowait(inbox, limit - 1)]
