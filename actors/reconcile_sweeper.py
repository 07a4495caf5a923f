"""ReconcileSweeper: finds operations that a crash interrupted and finishes them (SPEC.md 4.14).

Owns:    nothing: every repair is conditional on what it read.
Hears:   nothing: it sweeps every `period_s`, the first time directly after the start.
Says:    BatchStalled to the ingest streamer.
Crashes: only by bug, and starts over.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import trio

from actors.messages import BatchStalled, StreamerMessage
from actors.runtime import Address
from actors.worker_roster import Roster
from conveyor.domain.errors import Refused
from conveyor.domain.ids import JobId, RunId
from conveyor.domain.model import Run
from conveyor.ports.errors import Unavailable
from conveyor.usecases import clock_repairs
from conveyor.usecases.context import Context
from conveyor.usecases.crash_isolation import Crash, isolate
from conveyor.usecases.run import demand, reconcile

log = logging.getLogger(__name__)

T = TypeVar("T")

# The pool of the one lease that workers share for sweeping; no job and no run has such an id. The
# two differ, because an engine may keep both kinds of names in one place.
SWEEPS = "sweeps"
_SWEEP_POOL, _SWEEP_RUN = JobId("sweep"), RunId("sweeper")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileSweeper:
    env: Context
    streamer: Address[StreamerMessage]
    roster: Roster = field(default_factory=Roster.of_one)
    period_s: float = 15.0
    deletion_period_s: float = 2.0
    batch_idle_s: float = 30.0
    # At the start every open batch counts as stalled: this process may have been its ingester.
    batch_idle_at_start_s: float = 0.0

    async def run(self) -> None:
        idle_s = self.batch_idle_at_start_s
        drained: dict[RunId, Run] = {}
        queues_at: float | None = None
        repairs = clock_repairs.RepairTrigger(self.env.clock)
        is_suspect = False
        async with trio.open_nursery() as nursery:
            # Events and deletions have their own loops: a long sweep of runs must not delay them.
            nursery.start_soon(self._number_events_forever)
            nursery.start_soon(self._delete_forever)
            while True:
                # Outside the turn: every worker may ingest, and the epoch of a batch decides
                # between two.
                await self._attempt("batches", partial(self._resume_batches, idle_s))
                is_suspect |= repairs.is_due()
                ahead_count: int | None = 0
                if is_suspect:
                    ahead_count = await self._attempt(
                        "batches from ahead", self._resume_batches_from_ahead
                    )
                # A worker that suspects times in the future repairs them, owner or not.
                is_owner = self.roster.owns(SWEEPS)
                if (is_owner or is_suspect) and await self._is_our_turn():
                    # Before the other sweeps, which find rows by their times.
                    if is_suspect:
                        repair = partial(clock_repairs.pull_back, self.env)
                        repaired = await self._attempt("clock", repair)
                        # An outage may have hidden some rows, and the streamer may not have
                        # reached a batch that this round sent: then the next round repairs again.
                        is_suspect = repaired is None or ahead_count != 0
                    if is_owner:
                        await self._attempt("runs", partial(self._sweep_runs, drained))
                        queues_at = await self._close_queues(queues_at)
                        await self._attempt("expiries", partial(reconcile.sweep_expired, self.env))
                        await self._attempt("rows", partial(reconcile.remove_old_rows, self.env))
                idle_s = self.batch_idle_s
                await self.roster.wait_turn(SWEEPS, self.period_s)

    async def _is_our_turn(self) -> bool:
        """Acquires the lease of the sweep, so that of many workers one sweeps the runs. The lease
        ages out before the next sweep. If it cannot be acquired because of an outage, a second
        sweep is harmless."""
        try:
            leases = await self.env.coordinator.acquire(
                _SWEEP_POOL, _SWEEP_RUN, count_max=1, cap=1, ttl_s=self.period_s / 2
            )
        except Unavailable as error:
            log.warning("swept without a lease", extra={"cause": str(error)})
            return True
        return bool(leases)

    async def _close_queues(self, last_at: float | None) -> float | None:
        """Returns when the last complete pass over ended runs began."""
        close = partial(reconcile.close_ended_queues, self.env, last_at=last_at)
        return await self._attempt("queues", close) or last_at

    async def _number_events_forever(self) -> None:
        while True:
            await self._attempt("events", partial(reconcile.place_events, self.env))
            await self.roster.wait_turn("events", self.deletion_period_s)

    async def _delete_forever(self) -> None:
        while True:
            is_left = await self._attempt("deletions", partial(reconcile.delete_due, self.env))
            # A deletion that was interrupted after its turn continues at once.
            if is_left:
                await trio.lowlevel.checkpoint()
            else:
                await self.roster.wait_turn("deletions", self.deletion_period_s)

    async def _attempt(self, what: str, sweep: Callable[[], Awaitable[T]]) -> T | None:
        """Performs one sweep. An outage, or a run that changes too fast, must not prevent the other
        sweeps."""
        try:
            done = await isolate(sweep, f"the sweep of {what}", expects=(Refused,))
            return None if isinstance(done, Crash) else done
        except (Unavailable, Refused) as error:
            log.warning(
                "sweep deferred: engine unavailable", extra={"sweep": what, "cause": str(error)}
            )
            return None

    async def _resume_batches(self, idle_s: float) -> None:
        for batch in await reconcile.stalled_batches(self.env, idle_s=idle_s):
            await self.streamer.tell(BatchStalled(batch))

    async def _resume_batches_from_ahead(self) -> int:
        batches = await clock_repairs.batches_from_ahead(self.env)
        for batch in batches:
            await self.streamer.tell(BatchStalled(batch))
        return len(batches)

    async def _sweep_runs(self, drained: dict[RunId, Run]) -> None:
        repairs = await reconcile.sweep_runs(self.env, drained)
        if self.env.config.measures_demand:
            await demand.publish(self.env, repairs.demand)
        if repairs.completed or repairs.stopped or repairs.resent:
            log.info(
                "runs repaired",
                extra={
                    "completed": repairs.completed,
                    "stopped": repairs.stopped,
                    "resent": repairs.resent,
                },
            )
