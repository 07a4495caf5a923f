"""Checks quotas: no caller exceeds its quotas by more than one request (I57)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from conveyor.domain.changes import ExportKey, JobKey
from conveyor.domain.lifecycle import JOB_VISIBLE
from conveyor.domain.model import JobStatus, JobType
from conveyor.domain.quota import Quota
from conveyor.simulation.invariant_monitor import StateChange

ONE_REQUEST = 1
"""Concurrent requests may each pass the check before the other is counted; a request creates one
job, run or export."""


def no_caller_exceeds_a_quota(state: StateChange) -> Iterator[str]:
    """I57: no caller has more live runs or open jobs, and no run more exports, than its quota and
    one more request allow. Runs that a schedule started are not counted, because no request made
    them. This is checked only in undisturbed worlds: where leases can be lost, two requests may be
    decided at the same time."""
    limits = state.history.quotas
    if not limits or not state.history.is_undisturbed:
        return
    if state.changed(JobKey):
        jobs = [job for job in state.after.jobs.values() if job.status in JOB_VISIBLE]
        submitted = [job for job in jobs if job.type is not JobType.SCHEDULED]
        live = Counter(job.caller for job in submitted if job.active_run_id is not None)
        yield from _exceeding(limits, Quota.LIVE_RUNS, live)
        is_open = Counter(job.caller for job in jobs if job.status is JobStatus.OPEN)
        yield from _exceeding(limits, Quota.OPEN_JOBS, is_open)
    if state.changed(ExportKey):
        exports = Counter(export.run_id for export in state.after.exports.values())
        yield from _exceeding(limits, Quota.EXPORTS_PER_RUN, exports)


def _exceeding(limits: Mapping[str, int], quota: Quota, used: Mapping[Any, int]) -> Iterator[str]:
    limit = limits.get(quota.value)
    for name, count in used.items():
        if limit is not None and count > limit + ONE_REQUEST:
            yield f"{name} uses {count} of quota {quota.value}, limit {limit}"
