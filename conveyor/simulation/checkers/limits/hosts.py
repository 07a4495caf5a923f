"""Checks host limits: a job keeps to its limits of concurrency and rate for each host (SPEC.md
4.8)."""

from __future__ import annotations

from collections.abc import Iterator

from conveyor.domain import limits
from conveyor.domain.model import HostLimit, Job
from conveyor.domain.submit.target import host_of
from conveyor.simulation.checkers.fetches import OVERSHOOT
from conveyor.simulation.client_history import Fetch
from conveyor.simulation.invariant_monitor import StateChange

# The rate is measured over this time.
WINDOW_S = 10.0


def no_host_is_fetched_beyond_its_limits(state: StateChange, fetch: Fetch) -> Iterator[str]:
    """No more pages of a host are fetched at once than the job allows, nor more within ten seconds.
    Where leases can be lost, twice the concurrency is allowed, or as much per worker if that is
    more."""
    host_limit = _limit_of(state, fetch)
    if host_limit is None:
        return
    job, host, limit = host_limit
    own = [
        other_fetch
        for other_fetch in state.history.fetches
        if _is_of(state, other_fetch, job, host)
    ]
    history = state.history
    times = 1 if history.is_fault_free else max(OVERSHOOT, history.workers_count)
    count = sum(other_fetch.ended_at is None for other_fetch in own)
    if limit.concurrency is not None and count > limit.concurrency * times:
        yield f"{count} pages of {host} are fetched at once for job {job.job_id}"
    if limit.rate_per_s is not None and history.is_fault_free:
        since = fetch.started_at - WINDOW_S
        recent = sum(other_fetch.started_at > since for other_fetch in own)
        most = limit.rate_per_s * (WINDOW_S + limits.HOST_SLACK_S) + 1
        if recent > most:
            yield f"{recent} pages of {host} were fetched in {WINDOW_S:.0f} s, limit {most:.1f}"


def _limit_of(state: StateChange, fetch: Fetch) -> tuple[Job, str, HostLimit] | None:
    run = state.after.run_by_id.get(fetch.run_id)
    job = state.after.jobs.get((run.job_id,)) if run is not None else None
    task = state.after.tasks.get((fetch.run_id, fetch.task_id))
    if job is None or task is None or job.host_limits is None:
        return None
    host = host_of(task.url)
    return None if host is None else (job, host, job.host_limits.limit_for(host))


def _is_of(state: StateChange, fetch: Fetch, job: Job, host: str) -> bool:
    run = state.after.run_by_id.get(fetch.run_id)
    task = state.after.tasks.get((fetch.run_id, fetch.task_id))
    is_own = run is not None and run.job_id == job.job_id
    return is_own and task is not None and host_of(task.url) == host
