"""Feeds a reply from a wire, at a pace: an idle and a total deadline in one cancel scope."""

from __future__ import annotations

import trio

from conveyor.net.reply import Reply
from conveyor.net.wire import Wire


class Pace:
    """The scope starts pulled in for the first read, as most fetches need no more; moving a
    deadline costs as much as parsing a response, so a slack of a tenth is left alone.
    """

    __slots__ = ("_deadline", "_read_timeout_s", "scope")

    def __init__(self, deadline_s: float, read_timeout_s: float) -> None:
        now = trio.current_time()
        self._deadline = now + deadline_s
        self._read_timeout_s = read_timeout_s
        self.scope = trio.CancelScope(deadline=now + min(deadline_s, read_timeout_s))

    def press(self) -> None:
        """From now on the peer has so long to send something."""
        until = min(trio.current_time() + self._read_timeout_s, self._deadline)
        current = self.scope.deadline
        if current > until or until - current > self._read_timeout_s / 10:
            self.scope.deadline = until

    def relax(self) -> None:
        """What follows is not a read: only the total deadline holds."""
        self.scope.deadline = self._deadline


class Reading:
    __slots__ = ("pace", "reply", "wire")

    def __init__(self, wire: Wire, reply: Reply, pace: Pace) -> None:
        self.wire = wire
        self.reply = reply
        self.pace = pace

    async def head(self) -> None:
        while not self.reply.is_head_done:
            await self.more()

    async def more(self) -> None:
        self.pace.press()
        data = await self.wire.receive()
        if data:
            self.reply.feed(data)
        else:
            self.reply.end_of_stream()
