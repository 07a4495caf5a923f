"""StatusReporter: publishes the status of this process and its runs, for `waiting_on`
(docs/api.md, Waiting).

Owns:    the status reports of this process: one about itself, and one for each run that it polls.
Hears:   nothing: it reads the WaitStatus that the pollers write.
Says:    nothing; the reports age out by themselves.
Crashes: only by bug. Nothing depends on it except the information that callers see.
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

# How long the withdrawal at the end may take. Without it, the report ages out after STATUS_TTL_S.
CLEANUP_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusReporter:
    env: Context
    wait_status: WaitStatus
    gate: FairLimiter
    # `look_s` is how late a new reason for waiting is shown. `renew_s` is how often unchanged
    # reports are published again; each is a write to the coordinator.
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
                # Between two renewals only changed reports are written.
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
    """Returns whether the report must be published now. The rate changes all the time and is
    published with the next renewal."""
    return before is None or (before.reason, before.since) != (now.reason, now.since)
