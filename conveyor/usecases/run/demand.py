"""Demand: how many slots the live runs need now, and the slots that there are
(docs/deploy.md, Scaling).

The process that sweeps the runs reads the depth of every queue anyway. It sums up the demand and
publishes it as a status text; every worker reads the text and the reports of all workers. So every
worker publishes the same percentage, and no process has to lead.

A run can use as many slots as it has messages, up to its cap, and it needs as many as finish its
messages within `HORIZON_S`. A fleet scaled by the first number alone starts workers for work that
is done before they are ready, and then pays for them until it scales in. A run that may still grow
needs at least the slots that it uses: its messages do not tell how much work there will be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from conveyor.domain.changes import JobKey
from conveyor.domain.model import PauseState, Run
from conveyor.domain.run.wait_reason import WaitReason
from conveyor.ports.queue import Depth
from conveyor.usecases.context import Context
from conveyor.usecases.run.run_progress import live_workers, load_run_reports

# The status subject of the latest sum. A sweep of thousands of runs takes minutes, so the text
# lives for longer than a few sweeps.
SUBJECT = "demand"
TTL_S = 600.0

# More workers do not help a run that waits for one of these, so only what it has in flight counts.
_OTHER_LIMITS = frozenset(WaitReason) - {
    WaitReason.JOB_CAP,
    WaitReason.WORKERS_BUSY,
    WaitReason.NO_WORKERS,
    WaitReason.INGEST,
}
# Target tracking needs three minutes to scale out, and a worker one to start. Work that the present
# workers finish in about that time needs no more of them.
HORIZON_S = 300.0
# The target that workers are scaled by (deploy/aws/service.yaml).
TARGET = 0.8


class RunDemand(msgspec.Struct, frozen=True):
    """The slots that a run could use and its messages. `leases` and `rate` are its leases and the
    tasks that it ends in a second, if it ended some lately. Without messages only the slots count.
    `grows`: it may get further tasks.
    """

    slots: int
    messages: int = 0
    leases: int = 0
    rate: float = 0.0
    grows: bool = False


class Total(msgspec.Struct, frozen=True):
    """The demand of all live runs, in slots, at a time, and the slots that those of them use that
    may grow. An earlier release did not tell them apart."""

    at: float
    slots: int
    growing: int | None = None


_TOTAL = msgspec.json.Decoder(Total)


class Demand(msgspec.Struct, frozen=True):
    """The demand beside the slots of all workers."""

    demand: int
    slots: int
    in_use: int

    @property
    def percent(self) -> float:
        """The demand in percent of the slots. Without any worker, every demand is unmet."""
        if not self.slots:
            return 0.0 if not self.demand else 100.0
        return round(100.0 * self.demand / self.slots, 2)


async def of_run(env: Context, run: Run, depth: Depth) -> RunDemand:
    """Returns how many tasks of the run could be in flight: as many as wait or run, up to the cap
    of its job. A paused run, or one that waits for something else than slots, wants no more."""
    job = await env.store.read(JobKey(run.job_id))
    if job is None or run.pause_state is PauseState.PAUSED:
        return RunDemand(0)
    messages = depth.visible + depth.hidden
    slots = min(messages, job.max_inflight)
    reports = await load_run_reports(env, run.run_id)
    rate = sum(report.rate for report in reports)
    is_held = any(report.reason in _OTHER_LIMITS for report in reports)
    if not is_held and not rate:
        return RunDemand(slots, messages)
    # Callers who submit many jobs, one after the other, have young runs all the time.
    grows = not run.last_batch_received or env.now() - run.created_at < HORIZON_S
    leases = await env.coordinator.count(run.run_id)
    if is_held:
        return RunDemand(min(slots, leases))
    return RunDemand(slots, messages, leases, rate, grows)


def slots_for(runs: Sequence[RunDemand], in_use: int) -> int:
    """Returns the slots that all runs need to finish in time. `in_use` are in use by all of them.

    The seconds that a page occupies a slot are the slots in use by the tasks that end in a second.
    A run with many pollers has idle leases beside those of its fetches, so its leases are counted
    in proportion. The pages of a run that has fetched none yet are taken to be like the others.
    """
    measured = [run for run in runs if run.rate]
    rate, leases = sum(run.rate for run in measured), sum(run.leases for run in measured)
    share = _used_share(runs, in_use)
    mean_s = share * leases / rate if rate else None
    return math.ceil(sum(_needed(run, share, mean_s) for run in runs))


def slots_of_growing(runs: Sequence[RunDemand], in_use: int) -> int:
    """Returns how many of the slots in use are used by runs that may get further tasks."""
    leases = sum(run.leases for run in runs if run.grows)
    return math.ceil(leases * _used_share(runs, in_use))


def _used_share(runs: Sequence[RunDemand], in_use: int) -> float:
    leases = sum(run.leases for run in runs if run.rate)
    return min(1.0, in_use / leases) if leases else 1.0


def _needed(run: RunDemand, share: float, mean_s: float | None) -> float:
    page_s = share * run.leases / run.rate if run.rate else mean_s
    if not run.messages or page_s is None:
        return run.slots
    return min(run.slots, run.messages * page_s / HORIZON_S)


async def publish(env: Context, runs: Sequence[RunDemand]) -> None:
    """Publishes the demand of all live runs. Raises Unavailable."""
    in_use = sum(worker.inflight for worker in await live_workers(env))
    total = Total(env.now(), slots_for(runs, in_use), slots_of_growing(runs, in_use))
    text = msgspec.json.encode(total).decode()
    await env.coordinator.put_status(env.process_id, {SUBJECT: text}, ttl_s=TTL_S)


async def load(env: Context) -> Demand:
    """Returns the demand of the latest sweep of any process, but at least the slots in use by runs
    that may grow, up to the target: a worker that is busy with them is needed, and does not by
    itself ask for another. Before the first sweep all slots in use count. Raises Unavailable."""
    workers = await live_workers(env)
    in_use = sum(worker.inflight for worker in workers)
    totals = [_TOTAL.decode(text) for text in await env.coordinator.list_status(SUBJECT)]
    latest = max(totals, key=lambda total: total.at, default=Total(0.0, 0))
    growing = in_use if latest.growing is None else min(in_use, latest.growing)
    # A draining worker takes no more work, so its slots are none.
    slots = sum(worker.capacity for worker in workers if not worker.draining)
    return Demand(max(latest.slots, min(growing, math.ceil(TARGET * slots))), slots, in_use)
