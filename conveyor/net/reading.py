"""Feeds a reply from a wire, under an idle and a total deadline."""

from __future__ import annotations

import trio

from conveyor.net.errors import TOO_LATE, BadRequest, ConnectionLost, TimedOut
from conveyor.net.message import Upload
from conveyor.net.reply import Reply
from conveyor.net.tls import TlsWire
from conveyor.net.watch import Watch
from conveyor.net.wire import Wire


class Reading:
    """One exchange on a wire. Every wait for the peer is watched, and nothing else is."""

    __slots__ = ("_patience_s", "_watch", "deadline", "reply", "wire")

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
        self._watch = watch
        self._patience_s = patience_s

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
            self._press()
            await self.wire.send(piece)
            self.relax()
        if left:
            raise BadRequest("the body is not as long as was announced")
        self._press()

    async def more(self) -> None:
        self._press()
        await self._receive()

    def relax(self) -> None:
        """What follows is no wait for the peer."""
        self._watch.forget(self.wire)

    def _press(self) -> None:
        """From now on the peer has so long to send something."""
        now = trio.current_time()
        if now >= self.deadline:
            raise TimedOut(TOO_LATE)
        self._watch.expect(self.wire, min(now + self._patience_s, self.deadline))

    async def _receive(self) -> None:
        data = await self.wire.receive()
        if data:
            self.reply.feed(data)
        else:
            self.reply.end_of_stream()
