"""RedisSignals: news of runs between processes, by publish and subscribe (SPEC 6.8).

Whoever misses one finds out by looking. The truth is in the rows: a signal only says where to look.
"""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from enum import StrEnum
from typing import NoReturn

import msgspec
import trio

from conveyor.domain.ids import JobId, RunId
from conveyor.engines.redis import names
from conveyor.engines.redis.link import RedisLink, translating
from conveyor.ports.coordinator import Coordinator
from conveyor.ports.errors import Unavailable
from conveyor.ports.signals import Receipt, Signals

log = logging.getLogger(__name__)

LISTEN_AGAIN_S = 1.0
LOOK_S = 0.02
WALK_S = 10.0


class _Word(StrEnum):
    CHANGED = "changed"
    OPENED = "opened"


class _Said(msgspec.Struct, frozen=True):
    by: str
    word: _Word
    job_id: JobId
    run_id: RunId


_DECODER = msgspec.json.Decoder(_Said)


class RedisSignals:
    """`local` are the signals of the worker in this process, if there is one: it hears at once.

    `can_abandon` where calls are made by a gateway elsewhere, which goes on when we hang up.
    """

    def __init__(
        self,
        link: RedisLink,
        coordinator: Coordinator,
        *,
        space: str,
        owner: str,
        local: Signals | None,
        can_abandon: bool,
    ) -> None:
        self._link = link
        self._coordinator = coordinator
        self._keys = names.Keys(space)
        self._channel = f"{space}:signals"
        self._owner = owner
        self._local = local
        self._can_abandon = can_abandon

    async def run_changed(self, job_id: JobId, run_id: RunId) -> None:
        if self._local is not None:
            await self._local.run_changed(job_id, run_id)
        await self._say(_Word.CHANGED, job_id, run_id)

    async def batch_opened(self, job_id: JobId, run_id: RunId) -> None:
        """One worker is enough, and the one in this process the nearest."""
        if self._local is not None:
            await self._local.batch_opened(job_id, run_id)
        else:
            await self._say(_Word.OPENED, job_id, run_id)

    async def teardown(self, job_id: JobId, run_id: RunId, *, deadline_s: float) -> Receipt:
        """Others cannot answer: the leases are all that we share with them."""
        held = await self._coordinator.count(run_id)
        receipt = Receipt(held, held if self._can_abandon else 0, complete=False)
        with trio.move_on_after(deadline_s):
            await self._say(_Word.CHANGED, job_id, run_id)
            if self._local is not None:
                await self._local.teardown(job_id, run_id, deadline_s=deadline_s)
            is_held = True
            while is_held:
                is_held = await self._coordinator.count(run_id) > 0
                await trio.sleep(LOOK_S if is_held else 0)
            return msgspec.structs.replace(receipt, complete=True)
        return receipt

    async def listen_forever(self) -> NoReturn:
        """Passes on to the worker in this process what others say."""
        while True:
            try:
                with translating(math.inf):
                    async with self._link.hearing(self._channel) as heard:
                        async for message in heard:
                            await self._hear(_DECODER.decode(str(message["data"])))
            except (Unavailable, msgspec.DecodeError) as error:
                log.warning("signals are not heard for now", extra={"cause": str(error)})
            await trio.sleep(LISTEN_AGAIN_S)

    async def _hear(self, said: _Said) -> None:
        if self._local is None or said.by == self._owner:
            return
        if said.word is _Word.CHANGED:
            await self._local.run_changed(said.job_id, said.run_id)
        elif await self._is_first_at(said.run_id):
            await self._local.batch_opened(said.job_id, said.run_id)

    async def _is_first_at(self, run_id: RunId) -> bool:
        """Of all who hear of a list one walks it: others would only take it from each other."""
        try:
            with translating():
                return await self._link.put_first(
                    self._keys.walk(run_id), self._owner, ttl_s=WALK_S
                )
        except Unavailable:
            return False

    async def _say(self, word: _Word, job_id: JobId, run_id: RunId) -> None:
        text = msgspec.json.encode(_Said(self._owner, word, job_id, run_id)).decode()
        with suppress(Unavailable), translating():
            await self._link.publish(self._channel, text)
