"""Fetches: under a claim, once for each, and never more at once than a job may have (I17, I29)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from conveyor.domain.lifecycle import TASK_TERMINAL
from conveyor.domain.model import RunStatus
from conveyor.simulation.history import Fetch
from conveyor.simulation.watcher import Moment

OVERSHOOT = 2
"""How many times its cap a job may have in flight where leases were lost or outlived."""


def no_fetch_without_a_claim(moment: Moment, fetch: Fetch) -> Iterator[str]:
    """I17: who fetches a task has a claim on it that is in its row."""
    task = moment.after.tasks.get((fetch.run_id, fetch.task_id))
    if task is not None and fetch.claim > task.claim:
        yield f"task {_name(fetch)} is fetched under claim {fetch.claim} of {task.claim}"


def a_claim_fetches_once(moment: Moment) -> Iterator[str]:
    """I17: nobody is called twice under one claim, so a task is fetched at most as often as it
    was claimed."""
    counts = Counter((each.run_id, each.task_id, each.claim) for each in moment.history.fetches)
    for (run_id, task_id, claim), count in counts.items():
        if count > 1:
            yield f"task {run_id}/{task_id} was fetched {count} times under claim {claim}"


def every_fetch_is_an_attempt(moment: Moment) -> Iterator[str]:
    """I17: in a world that is spared, a task is fetched as often as it was tried. What was handed
    back may have been begun: its message came back before its claim was made (seed 2107)."""
    if not moment.history.is_spared or moment.history.kills_count:
        return
    counts = Counter((each.run_id, each.task_id) for each in moment.history.fetches)
    for address, task in moment.after.tasks.items():
        run = moment.after.run_by_id.get(task.run_id)
        is_whole = run is not None and run.status is RunStatus.COMPLETED
        if not is_whole or task.source_run_id is not None or task.status not in TASK_TERMINAL:
            continue
        count = counts[task.run_id, task.task_id]
        if not task.attempts <= count <= task.attempts + task.handed_back:
            tried = f"{count} times for {task.attempts} attempts"
            yield f"task {'/'.join(address)} was fetched {tried}"


def no_job_is_fetched_beyond_its_cap(moment: Moment, fetch: Fetch) -> Iterator[str]:
    """I29: no more pages of a job are fetched at once than its `max_inflight`. Where something
    happened to those who hold leases, or to whoever keeps them, twice as many; where it happens
    again and again, as many by each worker."""
    run = moment.after.run_by_id.get(fetch.run_id)
    job = moment.after.jobs.get((run.job_id,)) if run is not None else None
    if job is None:
        return
    own = {each.run_id for each in moment.after.runs_by_job[job.job_id]}
    count = sum(each.run_id in own for each in moment.history.in_flight())
    history = moment.history
    times = 1 if history.is_spared else max(OVERSHOOT, history.workers_count)
    most = job.max_inflight * times
    if count > most:
        yield f"{count} pages of job {job.job_id} are fetched at once, of {most}"


def _name(fetch: Fetch) -> str:
    return f"{fetch.run_id}/{fetch.task_id}"
