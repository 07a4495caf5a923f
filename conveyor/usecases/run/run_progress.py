"""Loads what responses show of runs: counters, budget, why a run waits and when it may end, from
rows, leases and status reports (docs/api.md, Waiting); its series by minute; the figures of all
live runs.

The progress is informational. No decision depends on it, and an outage yields empty progress.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any

import msgspec
import trio

from conveyor.domain import limits
from conveyor.domain.changes import JobKey, TaskKey
from conveyor.domain.ids import RunId, TaskId, shard_of
from conveyor.domain.lifecycle import RUN_LIVE, RUN_LIVE_STORED, accepts_settles, displayed_status
from conveyor.domain.model import Job, PauseState, Run, RunStatus, Task, TaskStatus, Totals
from conveyor.domain.queries import RunsIn, SamplesOf, TasksOf
from conveyor.domain.run import series, wait_reason
from conveyor.domain.run.series import Bucket
from conveyor.domain.run.wait_reason import (
    RunFacts,
    RunOverview,
    RunProgress,
    RunReport,
    WorkerReport,
)
from conveyor.ports.cache import Cache, CachedValue, ReadTicket
from conveyor.ports.errors import Unavailable
from conveyor.telemetry import RunMetrics
from conveyor.usecases.context import Context, Read, together
from conveyor.usecases.lookup import load_budget, totals_of
from conveyor.usecases.run.results import run_instant

# The status subject under which each worker reports that it is alive.
WORKERS = "workers"
_RUN_REPORT = msgspec.json.Decoder(RunReport)
_PRESENCE = msgspec.json.Decoder(WorkerReport)


async def fresh_overview(env: Context, run: Run, totals: Totals | None = None) -> RunOverview:
    """For the response to a change, which contains the change: totals are not read from the
    cache."""
    if totals is None:
        totals = await totals_of(env, run)
    await invalidate_totals(env, run)
    read_job = partial(_read_if_available, partial(env.store.read, JobKey(run.job_id)))
    job, budget, *signs = await together(
        read_job, partial(load_budget, env, run), *reads_of_signs(env, run)
    )
    return overview_of(env, job, run, (totals, budget, *signs))


async def cached_overview(env: Context, job: Job, run: Run) -> RunOverview:
    """For the response to a read. Its totals may come from the cache."""
    return overview_of(env, job, run, await together(*reads_of_overview(env, run)))


def reads_of_overview(env: Context, run: Run) -> list[Read]:
    """Returns what reads all that an overview has beside the run's row."""
    return [
        partial(cached_totals, env, run),
        partial(load_budget, env, run),
        *reads_of_signs(env, run),
    ]


def overview_of(env: Context, job: Job | None, run: Run, results: Sequence[Any]) -> RunOverview:
    """Makes an overview of what `reads_of_overview` have found."""
    totals, budget, *signs = results
    progress = progress_of(run, totals, signs_of(signs), job)
    expiring = msgspec.structs.replace(run, expires_at=run_instant(env, run))
    return RunOverview(expiring, totals, progress, budget)


class RunSigns(msgspec.Struct, frozen=True):
    """The work on a live run: its leases, and what the workers report."""

    inflight: int
    reports: tuple[RunReport, ...]
    workers: tuple[WorkerReport, ...]


async def load_progress(env: Context, run: Run, totals: Totals) -> RunProgress:
    read_job = partial(_read_if_available, partial(env.store.read, JobKey(run.job_id)))
    job, *signs = await together(read_job, *reads_of_signs(env, run))
    return progress_of(run, totals, signs_of(signs), job)


def reads_of_signs(env: Context, run: Run) -> list[Read]:
    """Returns what reads the signs of work; nothing for an ended run."""
    if run.status not in RUN_LIVE:
        return []
    return [
        partial(_read_if_available, partial(env.coordinator.count, run.run_id)),
        partial(_read_if_available, partial(load_run_reports, env, run.run_id)),
        partial(_read_if_available, partial(live_workers, env)),
    ]


def signs_of(results: Sequence[Any]) -> RunSigns | None:
    """Returns what `reads_of_signs` have found; None if one of them was not possible."""
    if not results or None in results:
        return None
    inflight, reports, workers = results
    return RunSigns(inflight, tuple(reports), tuple(workers))


async def _read_if_available(read: Read) -> Any:
    """These values are informational: an outage must not fail the request."""
    with suppress(Unavailable):
        return await read()
    return None


def progress_of(run: Run, totals: Totals, signs: RunSigns | None, job: Job | None) -> RunProgress:
    if signs is None:
        return RunProgress()
    facts = RunFacts(
        run=run,
        totals=totals,
        inflight=signs.inflight,
        # The job may have been deleted between the two reads.
        cap=limits.MAX_INFLIGHT if job is None else job.max_inflight,
        reports=signs.reports,
        workers=signs.workers,
    )
    return RunProgress(
        signs.inflight, wait_reason.explain(facts), wait_reason.eta_s(facts), facts.rate_per_s
    )


async def longest_fetches(env: Context, run: Run) -> list[Task]:
    """Returns tasks that are being fetched, the oldest first: all of a run with few tasks, and of a
    longer one those that its workers reported within the last seconds.

    In a long run the rows of tasks in flight are too rare to be found by reading.
    """
    if run.status not in RUN_LIVE:
        return []
    if max(run.planned, run.total) <= env.config.rows_read_max:
        query = TasksOf(
            job_id=run.job_id,
            run_id=run.run_id,
            shard_count=run.shard_count,
            statuses=frozenset({TaskStatus.PROCESSING}),
            limit=limits.PAGE_ROWS_MAX,
        )
        tasks = (await env.store.page_tasks(query, read_max=env.config.rows_read_max)).tasks
    else:
        reports = await load_run_reports(env, run.run_id)
        oldest = sorted(
            (fetch.started_at, fetch.task_id) for seen in reports for fetch in seen.oldest
        )
        keys = [_task_key(run, task_id) for _, task_id in oldest[: limits.OLDEST_FETCHES]]
        tasks = [task for key in keys if (task := await env.store.read(key)) is not None]
    flying = [task for task in tasks if task.status is TaskStatus.PROCESSING]
    flying.sort(key=lambda task: (task.started_at or task.updated_at, task.task_id))
    return flying[: limits.OLDEST_FETCHES]


def _task_key(run: Run, task_id: TaskId) -> TaskKey:
    return TaskKey(run.job_id, run.run_id, task_id, shard_of(task_id, run.shard_count))


async def publish_presence(env: Context, presence: WorkerReport) -> None:
    """Publishes that this process is alive."""
    marks = {WORKERS: _encode(presence)}
    await env.coordinator.put_status(env.process_id, marks, ttl_s=limits.PRESENCE_TTL_S)


async def publish_reports(env: Context, reports: Mapping[RunId, RunReport]) -> None:
    """Publishes what this process knows about its runs."""
    marks: dict[str, str] = {run_id: _encode(report) for run_id, report in reports.items()}
    await env.coordinator.put_status(env.process_id, marks, ttl_s=limits.STATUS_TTL_S)


async def withdraw_presence(env: Context) -> None:
    """Withdraws the report of this process at its end. Its reports on runs age out."""
    await env.coordinator.put_status(env.process_id, {WORKERS: ""}, ttl_s=0.0)


async def leave_abandoned(env: Context, run_id: RunId, count: int) -> None:
    """Publishes how many calls of the run the gateway continues, for the receipt of a stop."""
    marks = {_abandoned_name(run_id): str(count)}
    # No call lasts longer than SCRAPE_DEADLINE_S, so the report may then age out.
    await env.coordinator.put_status(env.process_id, marks, ttl_s=limits.SCRAPE_DEADLINE_S)


async def count_abandoned(env: Context, run_id: RunId) -> int:
    """Returns how many calls of the run were interrupted recently, over all processes."""
    return sum(map(int, await env.coordinator.list_status(_abandoned_name(run_id))))


def _abandoned_name(run_id: RunId) -> str:
    return f"abandoned-{run_id}"


def _encode(value: msgspec.Struct) -> str:
    return msgspec.json.encode(value).decode()


# Overview: the workers and the live runs, for operators
# (docs/operations.md, Endpoints for operators).


async def load_run_reports(env: Context, run_id: RunId) -> list[RunReport]:
    """Returns what the workers report on a run. Raises Unavailable."""
    return [_RUN_REPORT.decode(text) for text in await env.coordinator.list_status(run_id)]


async def live_workers(env: Context) -> list[WorkerReport]:
    """Returns the reports of the running workers. Raises Unavailable."""
    reports = [_PRESENCE.decode(text) for text in await env.coordinator.list_status(WORKERS)]
    return sorted(reports, key=lambda report: report.worker)


class LiveRun(msgspec.Struct, frozen=True):
    run: Run
    status: RunStatus
    totals: Totals
    outlook: RunProgress


async def live_runs(env: Context, *, limit: int) -> list[LiveRun]:
    runs = await env.store.find(RunsIn(statuses=RUN_LIVE_STORED, limit=limit))
    live: list[LiveRun] = []
    for run in runs:
        totals = await totals_of(env, run)
        seen = await load_progress(env, run, totals)
        live.append(LiveRun(run, displayed_status(run, totals), totals, seen))
    return live


# Cached counters: the counters of a live run, for GET requests (SPEC.md 2.3).
#
# Code that makes a decision reads the counters themselves (`totals_of`).


# How long a request waits for another request that reads the same counters. After that it reads
# them itself. A longer wait saves reads and delays responses when the reader is lost.
WAIT_TIMEOUT_S = 0.25
# Interval at which a waiting request checks the cache.
_LOOK_S = 0.02
_DECODER = msgspec.json.Decoder(Totals)


async def cached_totals(env: Context, run: Run) -> Totals:
    """Returns the run's counters, at most CACHED_COUNTERS_TTL_S old, and never older than counters
    that were shown before."""
    if env.cache is None or not _is_under_way(run):
        return await totals_of(env, run)
    cached = await _look(env.cache, run)
    if isinstance(cached, CachedValue):
        return _DECODER.decode(cached.text)
    totals = await totals_of(env, run)
    current = None
    with suppress(Unavailable):
        # The cache was unavailable. Invalidate it, or it could later show older counters than
        # these.
        if cached is None:
            await env.cache.delete(run.run_id)
        else:
            text = msgspec.json.encode(totals).decode()
            current = await env.cache.put(run.run_id, cached, text)
    return totals if current is None else _DECODER.decode(current.text)


async def invalidate_totals(env: Context, run: Run) -> None:
    """Called before a response shows counters from the store: the cache must not show older ones
    later."""
    if env.cache is not None and _is_under_way(run):
        with suppress(Unavailable):
            await env.cache.delete(run.run_id)


async def _look(cache: Cache, run: Run) -> CachedValue | ReadTicket | None:
    """Returns the cached value, a ticket to read it, or None if the cache is unavailable. Of many
    concurrent requests one reads and the others wait for it."""
    patient_until = trio.current_time() + WAIT_TIMEOUT_S
    with suppress(Unavailable):
        while True:
            insists = trio.current_time() >= patient_until
            cached = await cache.get(
                run.run_id, _version(run), ttl_s=limits.CACHED_COUNTERS_TTL_S, insists=insists
            )
            if cached is not None:
                return cached
            await trio.sleep(_LOOK_S)
    return None


def _is_under_way(run: Run) -> bool:
    """Returns whether the run has all its lists and no stop request. Otherwise its counters change
    for reasons other than settles, or a decision is near, and they are read directly."""
    return accepts_settles(run) and run.open_batches == 0


def _version(run: Run) -> str:
    """A digest of the run's row: counters that were cached with an older row must not be shown
    beside a newer one."""
    return blake2b(msgspec.json.encode(run), digest_size=8).hexdigest()


# Samples of the counters of live runs, and the series that is made of them (docs/api.md, Series).


async def store_sample(env: Context, run: Run, totals: Totals) -> None:
    """Stores a sample if one is due. If another sweeper was faster, the refusal has no effect."""
    change = series.take_sample(run, totals, now=env.now(), tasks_min=env.config.sample_tasks_min)
    if change is not None:
        await env.commit(change)


async def load_series(env: Context, run: Run, totals: Totals) -> list[Bucket]:
    """Returns what ended in each minute. The sum of the buckets is `totals`."""
    query = SamplesOf(job_id=run.job_id, run_id=run.run_id, limit=limits.SAMPLES_MAX)
    return series.make_series(run, await env.store.find(query), totals, now=env.now())


# The figures of all live runs for `/metrics` (docs/operations.md, Metrics).

# Scrapers ask every 15 s or so, and several may ask: on AWS each refresh costs reads.
REFRESH_S = 15.0
# More live runs than this are not counted: each costs reads of its counters.
RUNS_MAX = 500
PAUSED = "paused"


@dataclass(slots=True)
class RunFigures:
    """Reads the figures, at most every REFRESH_S: `read_at` is when they were read last."""

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
