"""StatusReporter: publishes the status of the runs that this process polls, for `waiting_on`
(docs/api.md, Waiting).

Owns:    the status reports of this process: one for each run that it polls.
Hears:   nothing: it reads the WaitStatus, to which pollers and task runners write single values.
Says:    nothing; the reports age out by themselves.
Crashes: only by bug. Nothing depends on it except the information that callers see.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import islice

import trio

from conveyor.domain import limits
from conveyor.domain.ids import RunId, TaskId
from conveyor.domain.model import FailureReason
from conveyor.domain.run.wait_reason import OpenFetch, RunReport, WaitReason
from conveyor.ports.errors import Unavailable
from conveyor.usecases.context import Context
from conveyor.usecases.run import run_progress

log = logging.getLogger(__name__)

# A reason that returns within this time counts as uninterrupted: a run at its cap has room for a
# moment whenever a task ends. A larger value shows reasons that are gone; a smaller one makes
# `since` jump.
DEBOUNCE_S = 1.0
# Time constant of the moving average of the rate. A larger value makes the estimate of the end
# steadier and slower to follow changes.
RATE_WINDOW_S = 20.0
# Shorter fetches are not reported: most of them have ended before their report is read.
LONG_FETCH_S = 2.0


@dataclass(slots=True)
class _Entry:
    reason: WaitReason | None = None
    since: float = 0.0
    detail: str | None = None
    cleared_at: float | None = None
    ended: int = 0
    # The moving average from zero, and the share that has been measured so far.
    average: float = 0.0
    measured: float = 0.0
    last_failure: FailureReason | None = None
    # In the order of their beginnings: the first ones are the oldest.
    fetches: dict[TaskId, float] = field(default_factory=dict)

    def set_reason(self, reason: WaitReason | None, at: float, detail: str | None) -> None:
        if reason is None:
            self.cleared_at = at if self.cleared_at is None else self.cleared_at
            return
        # The same reason again keeps its `since`.
        if reason is not self.reason or not self._is_held(at):
            self.reason, self.since = reason, at
        self.detail = detail
        self.cleared_at = None

    def take_report(self, now: float, elapsed_s: float) -> RunReport:
        if elapsed_s > 0:
            share = 1.0 - math.exp(-elapsed_s / RATE_WINDOW_S)
            self.average += (self.ended / elapsed_s - self.average) * share
            self.measured += (1.0 - self.measured) * share
            self.ended = 0
        # The division removes the zero before the first measurement from the average.
        rate = round(self.average / self.measured, 3) if self.measured else 0.0
        oldest = self._oldest(now)
        if self.reason is None or not self._is_held(now):
            return RunReport(rate=rate, oldest=oldest)
        return RunReport(self.reason, self.since, rate, self.detail, oldest)

    def _oldest(self, now: float) -> tuple[OpenFetch, ...]:
        first = islice(self.fetches.items(), limits.OLDEST_FETCHES)
        return tuple(OpenFetch(task, at) for task, at in first if now - at >= LONG_FETCH_S)

    def _is_held(self, now: float) -> bool:
        return self.cleared_at is None or now - self.cleared_at < DEBOUNCE_S


class WaitStatus:
    """What the pollers of this process know about their runs. No method waits, and nothing is
    stored."""

    def __init__(self) -> None:
        self._runs: defaultdict[RunId, _Entry] = defaultdict(_Entry)

    def set_reason(
        self, run_id: RunId, reason: WaitReason | None, *, at: float, detail: str | None = None
    ) -> None:
        """Sets the reason for which a run waits from now on; None if it does not wait."""
        self._runs[run_id].set_reason(reason, at, detail)

    def reason_of(self, run_id: RunId) -> WaitReason | None:
        """Returns the reason that was set last, for which the run waits still."""
        entry = self._runs.get(run_id)
        return None if entry is None or entry.cleared_at is not None else entry.reason

    def count_finished(self, run_id: RunId) -> None:
        """Counts a task that has ended."""
        self._runs[run_id].ended += 1

    def begin_fetch(self, run_id: RunId, task_id: TaskId, *, at: float) -> None:
        self._runs[run_id].fetches[task_id] = at

    def end_fetch(self, run_id: RunId, task_id: TaskId) -> None:
        """A run that was forgotten meanwhile stays forgotten."""
        entry = self._runs.get(run_id)
        if entry is not None:
            entry.fetches.pop(task_id, None)

    def set_last_failure(self, run_id: RunId, reason: FailureReason) -> None:
        """Records the reason of the latest failed attempt."""
        self._runs[run_id].last_failure = reason

    def backoff_of(self, run_id: RunId) -> WaitReason:
        """Returns why tasks of a run wait for their next attempt, by the latest failure."""
        entry = self._runs.get(run_id)
        if entry is not None and entry.last_failure is FailureReason.RATE_LIMITED:
            return WaitReason.RATE_LIMITED
        return WaitReason.RETRY_BACKOFF

    def forget(self, run_id: RunId) -> None:
        self._runs.pop(run_id, None)

    def take_reports(self, now: float, *, elapsed_s: float) -> dict[RunId, RunReport]:
        """Returns the report of every run, `elapsed_s` after the last call. Starts the next
        measurement of the rates."""
        return {run_id: entry.take_report(now, elapsed_s) for run_id, entry in self._runs.items()}


# A run that makes no progress for this long is logged. Shorter waits are a normal part of retries.
LONG_WAIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusReporter:
    env: Context
    wait_status: WaitStatus
    # `poll_s` is how late a new reason for waiting is shown. `renew_s` is how often unchanged
    # reports are published again; each is a write to the coordinator.
    poll_s: float = 2.0
    renew_s: float = 10.0

    def __post_init__(self) -> None:
        assert self.poll_s < self.renew_s
        assert self.renew_s * 2 < limits.STATUS_TTL_S  # One renewal may be missed.

    async def run(self) -> None:
        published: dict[RunId, RunReport] = {}
        logged: dict[RunId, float] = {}
        renewed_at, read_at = -math.inf, trio.current_time()
        while True:
            now = trio.current_time()
            reports = self.wait_status.take_reports(self.env.now(), elapsed_s=now - read_at)
            read_at = now
            self._log_long_waits(reports, logged)
            is_due = now - renewed_at >= self.renew_s
            # Between two renewals only changed reports are written.
            changed = {
                run: report
                for run, report in reports.items()
                if _must_publish(published.get(run), report)
            }
            if is_due or changed:
                await self._publish(reports if is_due else changed)
                published = {
                    run: reports[run]
                    for run in reports
                    if is_due or run in changed or run in published
                }
                renewed_at = now if is_due else renewed_at
            await trio.sleep(self.poll_s)

    def _log_long_waits(self, reports: dict[RunId, RunReport], logged: dict[RunId, float]) -> None:
        """Logs a run that has waited for LONG_WAIT_S, once for each wait. `logged` has the start of
        the wait that was logged last."""
        for run_id in logged.keys() - reports.keys():
            del logged[run_id]
        for run_id, report in reports.items():
            is_logged = report.since is None or logged.get(run_id) == report.since
            # A run at its own cap makes progress.
            if report.reason in {None, WaitReason.JOB_CAP} or is_logged:
                continue
            assert report.since is not None
            waited_s = self.env.now() - report.since
            if waited_s >= LONG_WAIT_S:
                logged[run_id] = report.since
                fields = {"run": run_id, "reason": report.reason, "seconds": round(waited_s)}
                detail = {"detail": report.detail} if report.detail else {}
                log.warning("run waits", extra={**fields, **detail})

    async def _publish(self, reports: dict[RunId, RunReport]) -> None:
        if not reports:
            return
        try:
            await run_progress.publish_reports(self.env, reports)
        except Unavailable as error:
            log.warning("status reports not published", extra={"cause": str(error)})


def _must_publish(before: RunReport | None, now: RunReport) -> bool:
    """Returns whether the report must be published now. The rate changes all the time and is
    published with the next renewal."""
    return before is None or (before.reason, before.since) != (now.reason, now.since)
