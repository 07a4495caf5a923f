"""Scheduler: fires what is due, in the order of time (SPEC.md 4.17).

Owns:    nothing: the schedules' rows say what is due, and their versions say who was first.
Hears:   nothing: it looks again when the next time has come, and now and then in between.
Says:    nothing: a fire tells discovery and the ingest streamer by the use case's own signals.
Crashes: only by bug. What was not fired is still due.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

import trio

from actors.clock_step import ClockStepDetector
from conveyor.domain.ids import JobId
from conveyor.domain.schedule.cron import UnknownZone
from conveyor.domain.schedule.schedule import Schedule
from conveyor.ports.errors import Unavailable
from conveyor.usecases import clock_repairs
from conveyor.usecases import schedule as schedules
from conveyor.usecases.context import Context
from conveyor.usecases.crash_isolation import Crash, isolate
from conveyor.usecases.schedule import Fired

log = logging.getLogger(__name__)

# A schedule that crashed so often is left alone by this process. It stays due for the next one,
# which may have a version of the program that can fire it.
CRASHES_MAX = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduler:
    env: Context
    period_s: float = 1.0
    page_rows: int = 200
    crashes: Counter[JobId] = field(default_factory=Counter)

    async def run(self) -> None:
        watch = ClockStepDetector(self.env.clock)
        is_suspect = True  # Before this process started, its clock may have been ahead.
        while True:
            is_suspect |= watch.was_set_back()
            try:
                if is_suspect:
                    await self._realign()
                is_suspect = False
                delay_s = await self._fire_due()
            except Unavailable as error:
                log.warning("schedules not read", extra={"cause": str(error)})
                delay_s = self.period_s
            await trio.sleep(delay_s)

    async def _realign(self) -> None:
        count = await clock_repairs.realign_schedules(self.env)
        if count:
            log.warning("schedules realigned: the clock was ahead", extra={"schedules": count})

    async def _fire_due(self) -> float:
        """Fires all that is due and answers how long nothing else will be."""
        last: Schedule | None = None
        horizon = self.env.now() + self.period_s
        while True:
            page = await schedules.due_schedules(
                self.env, by=horizon, after=last, limit=self.page_rows
            )
            for last in page:
                assert last.next_fire_at is not None
                wait_s = last.next_fire_at - self.env.now()
                if wait_s > 0:
                    return min(wait_s, self.period_s)
                await self._fire(last)
            if len(page) < self.page_rows:
                return self.period_s

    async def _fire(self, schedule: Schedule) -> None:
        """One that cannot be fired now must not keep the others waiting."""
        assert schedule.next_fire_at is not None
        extra = {"job": schedule.job_id, "late_s": self.env.now() - schedule.next_fire_at}
        if self.crashes[schedule.job_id] >= CRASHES_MAX:
            return
        try:
            fire = partial(schedules.trigger_schedule, self.env, schedule.job_id)
            fired = await isolate(fire, "a schedule", expects=(UnknownZone,), extra=extra)
        except (Unavailable, UnknownZone) as error:
            log.warning(
                "schedule trigger deferred: engine unavailable",
                extra={**extra, "cause": str(error)},
            )
            return
        if isinstance(fired, Crash):
            self.crashes[schedule.job_id] += 1
            return
        if fired in {Fired.STARTED, Fired.PASSED}:
            log.info("schedule triggered", extra={**extra, "outcome": fired.value})
