"""Demand: how many tasks the live runs could have in flight now, and the slots that there are
(docs/deploy.md, Scaling).

The process that sweeps the runs reads the depth of every queue anyway. It sums up the demand and
publishes it as a status text; every worker reads the text and the reports of all workers. So every
worker publishes the same percentage, and no process has to lead.
"""

from __future__ import annotations

import msgspec

from conveyor.domain.changes import JobKey
from conveyor.domain.model import PauseState, Run
from conveyor.domain.run.wait_reason import RunReport, WaitReason
from conveyor.ports.queue import Depth
from conveyor.usecases.context import Context
from conveyor.usecases.run.run_progress import live_workers

# The status subject of the latest sum. A sweep of thousands of runs takes minutes, so the text
# stands for longer than a few sweeps.
SUBJECT = "demand"
TTL_S = 600.0

# More workers do not help a run that waits for one of these, so only what it has in flight counts.
_OTHER_LIMITS = frozenset(WaitReason) - {
    WaitReason.JOB_CAP,
    WaitReason.WORKERS_BUSY,
    WaitReason.NO_WORKERS,
    WaitReason.INGEST,
}
_REPORT = msgspec.json.Decoder(RunReport)


class Total(msgspec.Struct, frozen=True):
    """The demand of all live runs, in slots, at a time."""

    at: float
    slots: int


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


async def of_run(env: Context, run: Run, depth: Depth) -> int:
    """Returns how many tasks of the run could be in flight: as many as wait or run, up to the cap
    of its job. A paused run, or one that waits for something else than slots, wants no more."""
    job = await env.store.read(JobKey(run.job_id))
    if job is None or run.pause_state is PauseState.PAUSED:
        return 0
    demand = min(depth.visible + depth.hidden, job.max_inflight)
    reports = map(_REPORT.decode, await env.coordinator.list_status(run.run_id))
    if any(report.reason in _OTHER_LIMITS for report in reports):
        return min(demand, await env.coordinator.count(run.run_id))
    return demand


async def publish(env: Context, slots: int) -> None:
    text = msgspec.json.encode(Total(env.now(), slots)).decode()
    await env.coordinator.put_status(env.process_id, {SUBJECT: text}, ttl_s=TTL_S)


async def load(env: Context) -> Demand:
    """Returns the demand of the latest sweep of any process. Before the first sweep the slots in
    use stand for it. Raises Unavailable."""
    workers = await live_workers(env)
    in_use = sum(worker.inflight for worker in workers)
    totals = [_TOTAL.decode(text) for text in await env.coordinator.list_status(SUBJECT)]
    latest = max(totals, key=lambda total: total.at, default=Total(0.0, in_use))
    # A draining worker takes no more work, so its slots are none.
    slots = sum(worker.capacity for worker in workers if not worker.draining)
    return Demand(latest.slots, slots, in_use)
