"""Feeds a reply from a wire, under an idle and a total deadline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

import trio

from conveyor.net.errors import (
    TOO_LATE,
    TOO_SLOW,
    BadRequest,
    ConnectionLost,
    TimedOut,
    TooSlow,
)
from conveyor.net.message import Upload
from conveyor.net.reply import Reply
from conveyor.net.slots import Rate
from conveyor.net.tls import TlsWire
from conveyor.net.watch import Watch
from conveyor.net.wire import Wire


class Reading:
    """One exchange on a wire. Every wait for the peer is watched, and nothing else is. `is_early`
    once the peer sent something before it had the whole request.
    """

    __slots__ = (
        "_patience_s",
        "_rate",
        "_rate_since",
        "_received_bytes",
        "_waiting_since",
        "_watch",
        "deadline",
        "is_early",
        "reply",
        "wire",
    )

    def __init__(
        self,
        wire: Wire | TlsWire,
        reply: Reply,
        watch: Watch,
        *,
        deadline: float,
        patience_s: float,
    ) -> None:
        self.wire = wire
        self.reply = reply
        self.deadline = deadline
        self.is_early = False
        self._watch = watch
        self._patience_s = patience_s
        self._rate: Rate | None = None
        self._received_bytes = 0
        self._rate_since: float | None = None
        self._waiting_since: float | None = None

    def require_rate(self, rate: Rate) -> None:
        """From the next wait on the peer must send at this rate at least: TooSlow. Called again, it
        counts anew.
        """
        self._rate = rate
        self._rate_since = None
        self._received_bytes = 0

    def change_rate(self, rate: Rate) -> None:
        """The same, for what was received since `require_rate`, and for a wait that goes on."""
        self._rate = rate
        if self._waiting_since is not None:
            self._watch.expect(self.wire, self._until(self._waiting_since))

    def excuse(self, seconds: float) -> None:
        """The peer was not waited for that long: it is not the peer's delay."""
        if self._rate_since is not None:
            self._rate_since += seconds

    async def ask(self, data: bytes, upload: Upload | None = None) -> None:
        """Send, and read on until the head of the answer is there."""
        self._press()
        await self.wire.send(data)
        if upload is not None:
            try:
                await self._send_all(upload)
            except ConnectionLost:
                self._press()  # It may have answered before it hung up on what it did not want.
        await self._receive()
        while not self.reply.is_head_done:
            await self.more()

    async def _send_all(self, upload: Upload) -> None:
        """Only the peer is watched, not whoever makes the pieces."""
        self.relax()
        left = upload.size_bytes
        async for piece in upload.pieces:
            left -= len(piece)
            if left < 0:
                break
            self.is_early = self.is_early or not self.wire.is_quiet()
            self._press()
            await self.wire.send(piece)
            self.relax()
        if left:
            raise BadRequest("the body is not as long as was announced")
        self._press()

    async def more(self) -> None:
        now = trio.current_time()
        if now >= self.deadline:
            raise TimedOut(TOO_LATE)
        if self._rate_since is None:
            self._rate_since = now
        if now >= self._slow_at():
            raise TooSlow(TOO_SLOW)
        self._waiting_since = now
        try:
            self._received_bytes += await self._receive_in_time(now)
        finally:
            self._waiting_since = None

    async def _receive_in_time(self, since: float) -> int:
        while True:
            self._watch.expect(self.wire, self._until(since))
            try:
                return await self._receive()
            except TimedOut:
                now = trio.current_time()
                if now >= self._slow_at():
                    raise TooSlow(TOO_SLOW) from None
                if now >= self._until(since):
                    raise
                # The rate was changed back between the alarm and this task's turn.

    def relax(self) -> None:
        """What follows is no wait for the peer."""
        self._watch.forget(self.wire)

    def _press(self) -> None:
        """From now on the peer has so long to send something."""
        now = trio.current_time()
        if now >= self.deadline:
            raise TimedOut(TOO_LATE)
        self._watch.expect(self.wire, min(now + self._patience_s, self.deadline))

    def _until(self, since: float) -> float:
        """When a wait for the peer that began at `since` has gone on for too long."""
        return min(since + self._patience_s, self.deadline, self._slow_at())

    def _slow_at(self) -> float:
        if self._rate is None or self._rate_since is None:
            return inf
        return self._rate_since + self._rate.seconds_for(self._received_bytes)

    async def _receive(self) -> int:
        data = await self.wire.receive()
        if data:
            self.reply.feed(data)
        else:
            self.reply.end_of_stream()
        return len(data)


@contextmanager
def until(deadline: float) -> Iterator[None]:
    """For what is no wait for a connected peer, and therefore not watched."""
    with trio.CancelScope(deadline=deadline) as scope:
        yield
    if scope.cancelled_caught:
        raise TimedOut(TOO_LATE)
