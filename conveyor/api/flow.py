"""Flow: keeps a request's body from piling up in memory (SPEC 4.1).

The framework reads a connection as fast as it brings, and holds whatever nobody has taken yet. Here
reading waits while that is more than a little, and so does the sender.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import trio

WAITING_BYTES_MAX = 1024 * 1024

Event = dict[str, Any]
Receive = Callable[[], Awaitable[Event]]

_FLOW = "conveyor.flow"


class _Flow:
    """Between who reads the connection and who takes the body."""

    def __init__(self) -> None:
        self.waiting_bytes = 0
        self.room = trio.Event()


def throttled(scope: Event, receive: Receive) -> Receive:
    """Receives for this request when there is room for more of its body."""
    flow = scope[_FLOW] = _Flow()

    async def receive_when_there_is_room() -> Event:
        while flow.waiting_bytes > WAITING_BYTES_MAX:
            await flow.room.wait()
        event = await receive()
        flow.waiting_bytes += len(event.get("body", b""))
        return event

    return receive_when_there_is_room


def took(scope: Event, size_bytes: int) -> None:
    """So much of the body is in other hands now."""
    flow: _Flow = scope[_FLOW]
    flow.waiting_bytes -= size_bytes
    flow.room.set()
    flow.room = trio.Event()
