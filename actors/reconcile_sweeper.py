"""ReconcileSweeper: finds what a crash left half done and has it finished (SPEC 6.9).

Owns:    nothing: every repair is conditional on what it read.
Hears:   nothing: it comes round by the clock, first of all right after a start.
Says:    BatchStalled to the ingest streamer.
Crashes: only by bug, and starts over.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import trio

from actors.messages import BatchStalled, StreamerMessage
from actors.runtime import Address
from conveyor.domain.errors import Refused
from conveyor.ports.errors import Unavailable
from conveyor.usecases import expiry, reconcile
from conveyor.usecases.env import Env

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileSweeper:
    env: Env
    streamer: Address[StreamerMessage]
    period_s: float = 15.0
    scrub_period_s: float = 2.0
    batch_idle_s: float = 30.0
    batch_idle_at_start_s: float = 0.0

    async def run(self) -> None:
        idle_s = self.batch_idle_at_start_s
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._place_forever)
            nursery.start_soon(self._scrub_forever)
            while True:
                await self._attempt("batches", partial(self._resume_batches, idle_s))
                await self._attempt("runs", self._sweep_runs)
                await self._attempt("queues", partial(reconcile.close_ended_queues, self.env))
                await self._attempt("expiries", partial(expiry.sweep_expired, self.env))
                idle_s = self.batch_idle_s
                await trio.sleep(self.period_s)

    async def _place_forever(self) -> None:
        while True:
            await self._attempt("events", partial(reconcile.place_events, self.env))
            await trio.sleep(self.scrub_period_s)

    async def _scrub_forever(self) -> None:
        while True:
            is_left = await self._attempt("scrubs", partial(reconcile.scrub_due, self.env))
            await trio.sleep(0 if is_left else self.scrub_period_s)

    async def _attempt(self, what: str, sweep: Callable[[], Awaitable[object]]) -> object:
        """One outage, or one run that changes too fast, must not keep the rest waiting."""
        try:
            return await sweep()
        except (Unavailable, Refused) as error:
            log.warning("sweep put off", extra={"sweep": what, "cause": str(error)})
            return None

    async def _resume_batches(self, idle_s: float) -> None:
        for batch in await reconcile.stalled_batches(self.env, idle_s=idle_s):
            await self.streamer.tell(BatchStalled(batch))

    async def _sweep_runs(self) -> None:
        repairs = await reconcile.sweep_runs(self.env)
        if repairs.completed or repairs.stopped or repairs.resent:
            log.info(
                "runs repaired",
                extra={
                    "completed": repairs.completed,
                    "stopped": repairs.stopped,
                    "resent": repairs.resent,
                },
            )
