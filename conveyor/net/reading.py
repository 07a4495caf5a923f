"""Feeds a reply from a wire, at a pace: an idle and a total deadline in one cancel scope."""

from __future__ import annotations

import trio

from conveyor.net.reply import Reply
from conveyor.net.wire import Wire


class Pace:
    """The scope is pulled in before each read and let out again; the total never moves."""

    __slots__ = ("_deadline", "_read_timeout_s", "scope")

    def __init__(self, deadline_s: float, read_timeout_s: float) -> None:
        self._deadline = trio.current_time() + deadline_s
        self._read_timeout_s = read_timeout_s
        self.scope = trio.CancelScope(deadline=self._deadline)

    def press(self) -> None:
        """From now on the peer has so long to send something."""
        idle_until = trio.current_time() + self._read_timeout_s
        if idle_until < self._deadline:
            self.scope.deadline = idle_until

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
