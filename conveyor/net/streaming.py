"""Bodies that are too large to hold: read piece by piece over the pool."""

from __future__ import annotations

from collections.abc import Sequence

from conveyor.net.reading import Reading


class Incoming:
    """The head of an answer, and its body, undecoded and uncapped, for whoever iterates."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self.status = reading.reply.status
        self.headers: Sequence[tuple[bytes, bytes]] = reading.reply.headers

    def __aiter__(self) -> Incoming:
        return self

    async def __anext__(self) -> bytes:
        reading = self._reading
        while not (data := reading.reply.take()):
            if reading.reply.is_done:
                raise StopAsyncIteration
            await reading.more()
            # Between two pieces the reader may take its time: only the peer is watched.
            reading.relax()
        return data
