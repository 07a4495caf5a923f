"""Waiting: explains why a run makes no progress, and estimates when it ends
(docs/api.md, Waiting).

The facts come from rows, from leases and from the status reports of the processes. They are
informational and at most half a minute old. No decision about stored data depends on them.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from conveyor.domain.budget import Budget
from conveyor.domain.ids import TaskId
from conveyor.domain.lifecycle import accepts_settles
from conveyor.domain.model import PauseState, Run, Totals


class WaitReason(StrEnum):
    """Why a live run makes no progress."""

    PAUSED = "paused"  #: The caller paused the run.
    INGEST = "ingest"  #: The list is being ingested, and every task that is in has ended.
    BUDGET = "budget"  #: The budget cannot pay for another call.
    STORAGE = "storage"  #: Bodies cannot be stored, so no page is fetched.
    RESOURCES = "resources"  #: A worker has no file descriptors, memory, threads or ports left.
    #: The gateway does not answer, or fails for every target; probes test it.
    GATEWAY_UNAVAILABLE = "gateway_unavailable"
    JOB_CAP = "job_cap"  #: As many tasks are in flight as `max_inflight` allows.
    #: The gateway accepts no more concurrent calls of this API key.
    GATEWAY_LIMIT = "gateway_limit"
    HOST_CAP = "host_cap"  #: The limits of the run's hosts are reached.
    #: All remaining tasks wait to be retried; a site or the gateway asked to slow down.
    RATE_LIMITED = "rate_limited"
    RETRY_BACKOFF = "retry_backoff"  #: All remaining tasks wait to be retried.
    WORKERS_BUSY = "workers_busy"  #: Other runs use every slot of the workers.
    NO_WORKERS = "no_workers"  #: Tasks are ready and no worker runs.


# During one of these outages, no task of the run can be fetched.
OUTAGES = (WaitReason.STORAGE, WaitReason.RESOURCES, WaitReason.GATEWAY_UNAVAILABLE)


# The call limiter decides these for each call: other tasks of the run may continue.
GATEWAY_REASONS = frozenset({WaitReason.GATEWAY_UNAVAILABLE, WaitReason.GATEWAY_LIMIT})


class OpenFetch(msgspec.Struct, frozen=True, array_like=True):
    """A task that is being fetched, and when the fetch began."""

    task_id: TaskId
    started_at: float


class RunReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """The report of one process about one run: its wait reason, how many tasks end a second, and
    its longest fetches, the oldest first.

    `detail` is a sentence for people, if the process knows more than the reason.
    """

    reason: WaitReason | None = None
    since: float | None = None
    rate: float = 0.0
    detail: str | None = None
    oldest: tuple[OpenFetch, ...] = ()


class WorkerReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """The report of one running worker: its slots, and the slots in use.

    `usable` is the number of slots that the callers with tasks can hold: a part of the slots is
    kept for the next caller. The other fields are for people. A worker of an earlier release
    reports none of them.
    """

    capacity: int
    inflight: int
    worker: str = ""
    release: str = ""
    draining: bool = False
    usable: int = 0

    @property
    def usable_slots(self) -> int:
        """At least the slots in use: a caller that has gone leaves more behind for a moment."""
        return max(self.usable, self.inflight) if self.usable else self.capacity


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about a run: its rows, its leases and their cap, and the reports about it."""

    run: Run
    totals: Totals
    inflight: int
    cap: int
    reports: tuple[RunReport, ...] = ()
    workers: tuple[WorkerReport, ...] = ()

    @property
    def total(self) -> int:
        return max(self.run.planned, self.totals.admitted)

    @property
    def left(self) -> int:
        return self.total - self.totals.done

    @property
    def ready(self) -> int:
        """Admitted tasks that no worker holds, including those that wait for a retry."""
        return max(0, self.totals.admitted - self.totals.done - self.inflight)

    @property
    def rate_per_s(self) -> float:
        """Tasks that ended per second lately, over all processes."""
        return sum(report.rate for report in self.reports)


class Waiting(msgspec.Struct, frozen=True):
    """The main cause, as a code and as a sentence."""

    reason: WaitReason
    detail: str
    since: float | None = None


class RunProgress(msgspec.Struct, frozen=True):
    """Leases in use, the main reason for waiting, the estimated seconds to the end, and the tasks
    that ended per second lately; None if unknown."""

    inflight: int = 0
    waiting_on: Waiting | None = None
    eta_s: float | None = None
    rate_per_s: float | None = None


class RunOverview(msgspec.Struct, frozen=True):
    """What a caller is shown of a run. The `expires_at` of the run is that of its last result."""

    run: Run
    totals: Totals
    progress: RunProgress
    budget: Budget | None = None


def explain(facts: RunFacts) -> Waiting | None:
    """Returns why the run waits; None if it makes progress, has no work, or has ended."""
    run = facts.run
    if not accepts_settles(run) or not facts.left:
        return None
    reason = _cause(facts)
    if reason is None:
        return None
    since = [seen.since for seen in facts.reports if seen.reason is reason and seen.since]
    details = [seen.detail for seen in facts.reports if seen.reason is reason and seen.detail]
    detail = details[0] if details else _detail(facts, reason)
    return Waiting(reason, detail, min(since, default=None))


def _cause(facts: RunFacts) -> WaitReason | None:
    """Returns the first cause that would block the run even if all later ones were removed."""
    seen = {report.reason for report in facts.reports}
    if facts.run.pause_state is PauseState.PAUSED:
        return WaitReason.PAUSED
    for outage in OUTAGES:
        # This comes before the check for ready tasks: tasks in flight wait for the storage too.
        if outage in seen and facts.workers:
            return outage
    if not facts.ready:
        is_empty = facts.totals.admitted == facts.totals.done
        return WaitReason.INGEST if is_empty and facts.run.open_batches else None
    if WaitReason.BUDGET in seen:
        return WaitReason.BUDGET
    if not facts.workers:
        return WaitReason.NO_WORKERS
    if facts.inflight >= facts.cap:
        return WaitReason.JOB_CAP
    for limit in (WaitReason.GATEWAY_LIMIT, WaitReason.HOST_CAP):
        if limit in seen:
            return limit
    if facts.totals.retrying >= facts.ready:
        is_limited = WaitReason.RATE_LIMITED in seen
        return WaitReason.RATE_LIMITED if is_limited else WaitReason.RETRY_BACKOFF
    return WaitReason.WORKERS_BUSY if WaitReason.WORKERS_BUSY in seen else None


def _detail(facts: RunFacts, reason: WaitReason) -> str:
    slots = sum(worker.usable_slots for worker in facts.workers)
    busy = sum(worker.inflight for worker in facts.workers)
    retrying = f"{facts.totals.retrying:,} of {facts.left:,} tasks wait for their next try"
    return {
        WaitReason.PAUSED: "paused until somebody resumes it",
        WaitReason.INGEST: f"{facts.totals.admitted:,} of {facts.total:,} lines are in so far",
        WaitReason.BUDGET: "the budget is used up",
        WaitReason.STORAGE: "pages cannot be stored; one at a time is tried until they can",
        WaitReason.RESOURCES: "a worker is out of descriptors, memory, threads or ports",
        WaitReason.GATEWAY_UNAVAILABLE: "the gateway does not answer; it is tried now and then",
        WaitReason.GATEWAY_LIMIT: "the gateway takes no more calls at once",
        WaitReason.JOB_CAP: f"{facts.inflight:,} of {facts.cap:,} in flight",
        WaitReason.HOST_CAP: "as many pages of its hosts are in flight as may be",
        WaitReason.RATE_LIMITED: f"asked to slow down; {retrying}",
        WaitReason.RETRY_BACKOFF: retrying,
        WaitReason.WORKERS_BUSY: f"other runs use {busy - facts.inflight:,} of {slots:,} slots",
        WaitReason.NO_WORKERS: "no worker is running",
    }[reason]


def eta_s(facts: RunFacts) -> float | None:
    """Seconds until the remaining tasks are done at the recent rate; None if unknown."""
    rate = facts.rate_per_s
    # What stops the whole run: the recent rate only fades.
    if any(report.reason in (*OUTAGES, WaitReason.BUDGET) for report in facts.reports):
        return None
    if (
        not accepts_settles(facts.run)
        or facts.run.pause_state is PauseState.PAUSED
        or not facts.left
        or rate <= 0
    ):
        return None
    return facts.left / rate
