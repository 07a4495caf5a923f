"""One alarm clock for all the connections that wait for their peers.

A cancel scope for each request would cost as much as the rest of it. So a fetch writes down until
when it will wait, and a single task looks at the list when the first of these moments has come.
The task is started when there is something to wait for and ends when there no longer is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import Protocol

import trio

from conveyor.http_client.connection_limits import Rate
from conveyor.http_client.errors import (
    TOO_LATE,
    TOO_SLOW,
    BadRequest,
    ConnectionLost,
    TimedOut,
    TooSlow,
)
from conveyor.http_client.request import Upload
from conveyor.http_client.response_parser import ResponseParser
from conveyor.http_client.stream import TcpStream, TlsStream

# Many moments close together are looked at in one go: a deadline may be missed by so much.
GRAIN_S = 0.01


class Interruptible(Protocol):
    def interrupt(self) -> None:
        """Makes the wait that goes on, if one does, raise TimedOut."""
        ...


class DeadlineTimer:
    def __init__(self) -> None:
        self._until: dict[Interruptible, float] = {}
        self._next = inf
        self._alarm: trio.CancelScope | None = None

    def expect(self, waiting: Interruptible, until: float) -> None:
        """Interrupt `waiting` at `until`, unless it is forgotten or expected later by then."""
        self._until[waiting] = until
        if until < self._next:
            self._wake_at(until)

    def forget(self, waiting: Interruptible) -> None:
        self._until.pop(waiting, None)

    def _wake_at(self, moment: float) -> None:
        if self._alarm is not None:
            self._next = self._alarm.deadline = moment
        else:
            self._next = -inf  # The task is about to look at all of them.
            trio.lowlevel.spawn_system_task(self._run)

    async def _run(self) -> None:
        try:
            while self._until:
                self._next = self._interrupt_due(trio.current_time())
                with trio.CancelScope(deadline=self._next) as self._alarm:
                    await trio.sleep_forever()
        finally:
            self._alarm, self._next = None, inf

    def _interrupt_due(self, now: float) -> float:
        """Returns when to look again."""
        following = inf
        for waiting, until in self._until.items():
            if until <= now:
                waiting.interrupt()
            following = min(following, until)
        return max(following, now + GRAIN_S)


# Feeds a reply from a wire, under an idle and a total deadline.


class Exchange:
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
        wire: TcpStream | TlsStream,
        reply: ResponseParser,
        watch: DeadlineTimer,
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

    async def send(self, data: bytes, upload: Upload | None = None) -> None:
        """Send, and read on until the head of the answer is there."""
        self._start_timer()
        await self.wire.send(data)
        if upload is not None:
            try:
                await self._send_all(upload)
            except ConnectionLost:
                # It may have answered before it hung up on what it did not want.
                self._start_timer()
        await self._receive()
        while not self.reply.is_head_done:
            await self.read_more()

    async def _send_all(self, upload: Upload) -> None:
        """Only the peer is watched, not whoever makes the pieces."""
        self.stop_timer()
        left = upload.size_bytes
        async for piece in upload.pieces:
            left -= len(piece)
            if left < 0:
                break
            self.is_early = self.is_early or not self.wire.is_quiet()
            self._start_timer()
            await self.wire.send(piece)
            self.stop_timer()
        if left:
            raise BadRequest("the body is not as long as was announced")
        self._start_timer()

    async def read_more(self) -> None:
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

    def stop_timer(self) -> None:
        """What follows is no wait for the peer."""
        self._watch.forget(self.wire)

    def _start_timer(self) -> None:
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


# Bodies that are too large to hold: read piece by piece over the pool.


class StreamingResponse:
    """The head of an answer, and its body, undecoded and uncapped, for whoever iterates."""

    def __init__(self, reading: Exchange) -> None:
        self._reading = reading
        self.status = reading.reply.status
        self.headers: Sequence[tuple[bytes, bytes]] = reading.reply.headers

    def __aiter__(self) -> StreamingResponse:
        return self

    async def __anext__(self) -> bytes:
        reading = self._reading
        while not (data := reading.reply.take()):
            if reading.reply.is_done:
                raise StopAsyncIteration
            await reading.read_more()
            # Between two pieces the reader may take its time: only the peer is watched.
            reading.stop_timer()
        return data
