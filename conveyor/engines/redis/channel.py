"""RedisChannel: which runs have changed, told from process to process (SPEC.md 4.13).

Whoever misses it finds out by looking. The truth is in the rows: this only says where to look.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import NoReturn

import msgspec
import trio

from conveyor.domain.ids import JobId, RunId
from conveyor.engines.redis.link import Link, translating
from conveyor.ports.errors import Unavailable

log = logging.getLogger(__name__)

LISTEN_AGAIN_S = 1.0


class _Said(msgspec.Struct, frozen=True):
    by: str
    job_id: JobId
    run_id: RunId


_DECODER = msgspec.json.Decoder(_Said)


class RedisChannel:
    """`owner` names this process, which does not hear itself."""

    def __init__(self, link: Link, *, space: str, owner: str) -> None:
        self._link = link
        self._name = f"{space}:signals"
        self._owner = owner

    async def tell(self, job_id: JobId, run_id: RunId) -> None:
        """Tells whoever listens; that nobody can be told is no failure."""
        text = msgspec.json.encode(_Said(self._owner, job_id, run_id)).decode()
        with suppress(Unavailable), translating():
            await self._link.publish(self._name, text)

    async def listen_forever(self, hear: Callable[[JobId, RunId], Awaitable[None]]) -> NoReturn:
        """Passes on what others tell."""
        while True:
            try:
                with translating(math.inf):
                    async with self._link.hearing(self._name) as heard:
                        async for message in heard:
                            said = _DECODER.decode(str(message["data"]))
                            if said.by != self._owner:
                                await hear(said.job_id, said.run_id)
            except (Unavailable, msgspec.DecodeError) as error:
                log.warning("signals are not heard for now", extra={"cause": str(error)})
            await trio.sleep(LISTEN_AGAIN_S)
