"""Reads the figures of all live runs for `/metrics` (docs/operations.md, Metrics)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import trio

from conveyor.domain.model import PauseState, RunStatus
from conveyor.ports.errors import Unavailable
from conveyor.telemetry import RunMetrics
from conveyor.usecases.context import Context
from conveyor.usecases.run.run_progress import live_runs

# Scrapers ask every 15 s or so, and several may ask: on AWS each refresh costs reads.
REFRESH_S = 15.0
# More live runs than this are not counted: each costs reads of its counters.
RUNS_MAX = 500
PAUSED = "paused"


@dataclass(slots=True)
class RunFigures:
    """Remembers when the figures were read last."""

    read_at: float = float("-inf")

    async def refresh(self, env: Context, metrics: RunMetrics) -> None:
        """Sets the gauges. While the store is unavailable they keep their values."""
        now = trio.current_time()
        if now - self.read_at < REFRESH_S:
            return
        self.read_at = now
        try:
            live = await live_runs(env, limit=RUNS_MAX)
        except Unavailable:
            return
        states: Counter[str] = Counter()
        tasks: Counter[str] = Counter()
        oldest = env.now()
        ingesting = 0
        for progress in live:
            is_paused = progress.run.pause_state is PauseState.PAUSED
            states[PAUSED if is_paused else progress.status] += 1
            left = max(progress.run.planned, progress.totals.admitted) - progress.totals.done
            ingesting += max(0, progress.run.planned - progress.totals.admitted)
            retrying = min(max(0, progress.totals.retrying), left)
            inflight = min(progress.outlook.inflight, left - retrying)
            tasks["retrying"] += retrying
            tasks["inflight"] += inflight
            tasks["pending"] += left - retrying - inflight
            if left > inflight:
                oldest = min(oldest, progress.run.created_at)
        for state in (RunStatus.RUNNING, RunStatus.PENDING, PAUSED):
            metrics.live.labels(state).set(states[state])
        for state in ("inflight", "retrying", "pending"):
            metrics.tasks.labels(state).set(tasks[state])
        metrics.ingesting.set(ingesting)
        metrics.oldest_waiting.set(env.now() - oldest)
