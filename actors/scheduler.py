"""Scheduler: triggers due schedules, in the order of their times (SPEC.md 4.17).

Owns:    nothing: the schedules' rows state what is due, and their versions decide which scheduler
         triggers.
Hears:   nothing: it queries when the next time has come, and every `period_s`.
Says:    nothing: the use case signals discovery and the ingest streamer.
Crashes: only by bug. A schedule that was not triggered is still due.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

import trio

from actors.worker_roster import Roster
from conveyor.domain.ids import JobId
from conveyor.domain.schedule import Schedule, UnknownZone
from conveyor.ports.errors import Unavailable
from conveyor.usecases import clock_repairs
from conveyor.usecases import schedule as schedules
from conveyor.usecases.context import Context
from conveyor.usecases.crash_isolation import Crash, isolate
from conveyor.usecases.schedule import Fired

log = logging.getLogger(__name__)

# A schedule that crashed this often is skipped by this process. It stays due for the next process,
# which may have a release that can trigger it.
CRASHES_MAX = 5


# One worker triggers all schedules; the others would lose the race for each.
SUBJECT = "schedules"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduler:
    env: Context
    roster: Roster = field(default_factory=Roster.of_one)
    period_s: float = 1.0
    page_rows: int = 200
    crashes: Counter[JobId] = field(default_factory=Counter)

    async def run(self) -> None:
        repairs = clock_repairs.RepairTrigger(self.env.clock)
        is_suspect = False
        while True:
            is_suspect |= repairs.is_due()
            if not self.roster.owns(SUBJECT):
                # When it becomes the owner, the one before may have had a clock that was ahead.
                is_suspect = True
                await trio.sleep(self.period_s)
                continue
            try:
                if is_suspect:
                    await self._realign()
                # Only after a successful repair: an outage keeps it set for the next round.
                is_suspect = False
                delay_s = await self._trigger_due()
            except Unavailable as error:
                log.warning("schedules not read", extra={"cause": str(error)})
                delay_s = self.period_s
            await trio.sleep(delay_s)

    async def _realign(self) -> None:
        count = await clock_repairs.realign_schedules(self.env)
        if count:
            log.warning("schedules realigned: the clock was ahead", extra={"schedules": count})

    async def _trigger_due(self) -> float:
        """Triggers all due schedules. Returns the seconds until the next one, at most
        `period_s`."""
        last: Schedule | None = None
        # Schedules of the next period are read too, so that the sleep ends at the exact time of the
        # next one.
        horizon = self.env.now() + self.period_s
        while True:
            page = await schedules.due_schedules(
                self.env, by=horizon, after=last, limit=self.page_rows
            )
            for last in page:
                assert last.next_fire_at is not None
                wait_s = last.next_fire_at - self.env.now()
                # The page is ordered by time, so all later schedules are not due either.
                if wait_s > 0:
                    return min(wait_s, self.period_s)
                await self._trigger(last)
            if len(page) < self.page_rows:
                return self.period_s

    async def _trigger(self, schedule: Schedule) -> None:
        """Triggers one schedule. If it cannot trigger now, it must not delay the others."""
        assert schedule.next_fire_at is not None
        extra = {"job": schedule.job_id, "late_s": self.env.now() - schedule.next_fire_at}
        if self.crashes[schedule.job_id] >= CRASHES_MAX:
            return
        try:
            trigger = partial(schedules.trigger_schedule, self.env, schedule.job_id)
            outcome = await isolate(trigger, "a schedule", expects=(UnknownZone,), extra=extra)
        except (Unavailable, UnknownZone) as error:
            log.warning(
                "schedule trigger deferred: engine unavailable",
                extra={**extra, "cause": str(error)},
            )
            return
        if isinstance(outcome, Crash):
            self.crashes[schedule.job_id] += 1
            return
        if outcome in {Fired.STARTED, Fired.PASSED}:
            log.info("schedule triggered", extra={**extra, "outcome": outcome.value})
