"""Leases (SPEC 6.14: I29 to I31)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from conveyor.simulation.watcher import Moment


def leases_stay_within_the_cap(moment: Moment) -> Iterator[str]:
    """I29: a job never has more live leases than its `max_inflight`."""
    for job_id, count in sorted(Counter(lease.job_id for lease in moment.after.leases).items()):
        job = moment.after.jobs.get((job_id,))
        if job is not None and count > job.max_inflight:
            yield f"job {job_id} has {count} leases of {job.max_inflight}"


def dead_processes_hold_nothing(moment: Moment) -> Iterator[str]:
    """I31: when all is over, no lease is left."""
    if moment.after.leases:
        yield f"{len(moment.after.leases)} leases are left"
