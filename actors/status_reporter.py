"""StatusReporter: leaves marks of what this process sees, for those who show runs
(docs/api.md, Waiting).

Owns:    the marks of this process: its presence, and a sighting of each run it polls.
Hears:   nothing: it looks at the board that the pollers write on.
Says:    nothing; the marks age out by themselves.
Crashes: only by bug. Nothing depends on it but what people are told.
"""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from dataclasses import dataclass

import trio

from actors.limiters.fair_limiter import FairLimiter
from actors.runtime import bounded_cleanup
from actors.wait_status import WaitStatus
from conveyor.domain import limits
from conveyor.domain.ids import RunId
from conveyor.domain.run.wait_reason import RunReport, WorkerReport
from conveyor.ports.errors import Unavailable
from conveyor.usecases.context import Context
from conveyor.usecases.run import run_progress

log = logging.getLogger(__name__)

CLEANUP_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusReporter:
    env: Context
    wait_status: WaitStatus
    gate: FairLimiter
    look_s: float = 2.0
    renew_s: float = 10.0

    def __post_init__(self) -> None:
        assert self.look_s < self.renew_s
        assert self.renew_s * 2 < limits.STATUS_TTL_S  # One renewal may be missed.

    async def run(self) -> None:
        left: dict[RunId, RunReport] = {}
        left_at, looked_at = -math.inf, trio.current_time()
        try:
            while True:
                now = trio.current_time()
                seen = self.wait_status.snapshot(self.env.now(), elapsed_s=now - looked_at)
                looked_at = now
                is_due = now - left_at >= self.renew_s
                news = {run: each for run, each in seen.items() if _is_news(left.get(run), each)}
                if is_due or news:
                    await self._publish(seen if is_due else news)
                    left = {run: seen[run] for run in seen if is_due or run in news or run in left}
                    left_at = now if is_due else left_at
                await trio.sleep(self.look_s)
        finally:
            with bounded_cleanup(CLEANUP_S), suppress(Unavailable):
                await run_progress.withdraw_reports(self.env)

    async def _publish(self, sightings: dict[RunId, RunReport]) -> None:
        presence = WorkerReport(self.gate.slots_count, self.gate.inflight_count)
        try:
            await run_progress.publish_reports(self.env, presence, sightings)
        except Unavailable as error:
            log.warning("status reports not published", extra={"cause": str(error)})


def _is_news(before: RunReport | None, now: RunReport) -> bool:
    """The rate changes all the time; it comes along with the rest."""
    return before is None or (before.reason, before.since) != (now.reason, now.since)
