"""WaitStatus: what the pollers of this process know about their runs, for the status reporter.

Pollers write single values. No method waits, and nothing is stored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from conveyor.domain.ids import RunId
from conveyor.domain.model import FailureReason
from conveyor.domain.run.wait_reason import RunReport, WaitReason

# A reason that returns within this time counts as uninterrupted: a run at its cap has room for a
# moment whenever a task ends. A larger value shows reasons that are gone; a smaller one makes
# `since` jump.
DEBOUNCE_S = 1.0
# Time constant of the moving average of the rate. A larger value makes the estimate of the end
# steadier and slower to follow changes.
RATE_WINDOW_S = 20.0


@dataclass(slots=True)
class _Entry:
    reason: WaitReason | None = None
    since: float = 0.0
    detail: str | None = None
    cleared_at: float | None = None
    ended: int = 0
    rate: float = 0.0
    last_failure: FailureReason | None = None

    def set_reason(self, reason: WaitReason | None, at: float, detail: str | None) -> None:
        if reason is None:
            self.cleared_at = at if self.cleared_at is None else self.cleared_at
            return
        # The same reason again keeps its `since`.
        if reason is not self.reason or not self._is_held(at):
            self.reason, self.since = reason, at
        self.detail = detail
        self.cleared_at = None

    def snapshot(self, now: float, elapsed_s: float) -> RunReport:
        if elapsed_s > 0:
            fresh = self.ended / elapsed_s
            # The first measurement is taken as it is: an average with zero would be too low.
            share = 1.0 - math.exp(-elapsed_s / RATE_WINDOW_S) if self.rate else 1.0
            self.rate += (fresh - self.rate) * share
            self.ended = 0
        rate = round(self.rate, 3)
        if self.reason is None or not self._is_held(now):
            return RunReport(rate=rate)
        return RunReport(self.reason, self.since, rate, self.detail)

    def _is_held(self, now: float) -> bool:
        return self.cleared_at is None or now - self.cleared_at < DEBOUNCE_S


class WaitStatus:
    def __init__(self) -> None:
        self._runs: dict[RunId, _Entry] = {}

    def set_reason(
        self, run_id: RunId, reason: WaitReason | None, *, at: float, detail: str | None = None
    ) -> None:
        """Sets the reason for which a run waits from now on; None if it does not wait."""
        self._runs.setdefault(run_id, _Entry()).set_reason(reason, at, detail)

    def count_finished(self, run_id: RunId) -> None:
        """Counts a task that has ended."""
        self._runs.setdefault(run_id, _Entry()).ended += 1

    def set_last_failure(self, run_id: RunId, reason: FailureReason) -> None:
        """Records the reason of the latest failed attempt."""
        self._runs.setdefault(run_id, _Entry()).last_failure = reason

    def backoff_of(self, run_id: RunId) -> WaitReason:
        """Returns why tasks of a run wait for their next attempt, by the latest failure."""
        entry = self._runs.get(run_id)
        if entry is not None and entry.last_failure is FailureReason.RATE_LIMITED:
            return WaitReason.RATE_LIMITED
        return WaitReason.RETRY_BACKOFF

    def forget(self, run_id: RunId) -> None:
        self._runs.pop(run_id, None)

    def snapshot(self, now: float, *, elapsed_s: float) -> dict[RunId, RunReport]:
        """Returns the report of every run, `elapsed_s` after the last call."""
        return {run_id: entry.snapshot(now, elapsed_s) for run_id, entry in self._runs.items()}
