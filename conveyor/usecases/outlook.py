"""Outlook: why a run is not moving and when it may be over, from rows, leases and marks
(docs/api.md, Waiting)."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from conveyor.domain import limits, waiting
from conveyor.domain.changes import JobKey
from conveyor.domain.ids import RunId
from conveyor.domain.lifecycle import RUN_LIVE
from conveyor.domain.model import Run
from conveyor.domain.totals import Totals
from conveyor.domain.waiting import Facts, Presence, Sighting, Waiting
from conveyor.ports.errors import Unavailable
from conveyor.usecases.env import Env

WORKERS = "workers"
_SIGHTING = msgspec.json.Decoder(Sighting)
_PRESENCE = msgspec.json.Decoder(Presence)


class Outlook(msgspec.Struct, frozen=True):
    """Leases in use, the main cause of waiting, and seconds to the end; None where unknown."""

    inflight: int = 0
    waiting_on: Waiting | None = None
    eta_s: float | None = None


async def look_at(env: Env, run: Run, totals: Totals) -> Outlook:
    """Nothing here guards truth, so neither does its absence."""
    if run.status not in RUN_LIVE:
        return Outlook()
    try:
        inflight = await env.coordinator.count(run.run_id)
        job = await env.store.read(JobKey(run.job_id))
        sightings = await env.coordinator.marks_on(run.run_id)
        workers = await env.coordinator.marks_on(WORKERS)
    except Unavailable:
        return Outlook()
    facts = Facts(
        run=run,
        totals=totals,
        inflight=inflight,
        cap=limits.MAX_INFLIGHT if job is None else job.max_inflight,
        sightings=tuple(map(_SIGHTING.decode, sightings)),
        workers=tuple(map(_PRESENCE.decode, workers)),
    )
    return Outlook(inflight, waiting.explain(facts), waiting.eta_s(facts))


async def leave_marks(env: Env, presence: Presence, sightings: Mapping[RunId, Sighting]) -> None:
    """Tells everybody that this process is at work, and what it sees."""
    marks = {WORKERS: _encoded(presence)}
    marks |= {run_id: _encoded(sighting) for run_id, sighting in sightings.items()}
    await env.coordinator.leave_marks(env.owner, marks, ttl_s=limits.SIGHTING_TTL_S)


async def take_back_presence(env: Env) -> None:
    """This process works no more; what it saw ages out."""
    await env.coordinator.leave_marks(env.owner, {WORKERS: ""}, ttl_s=0.0)


async def leave_abandoned(env: Env, run_id: RunId, count: int) -> None:
    """Tells whoever stops the run how many of its calls the gateway goes on with."""
    marks = {_abandoned(run_id): str(count)}
    await env.coordinator.leave_marks(env.owner, marks, ttl_s=limits.SCRAPE_DEADLINE_S)


async def count_abandoned(env: Env, run_id: RunId) -> int:
    """How many calls of the run were cut off lately, over all processes."""
    return sum(map(int, await env.coordinator.marks_on(_abandoned(run_id))))


def _abandoned(run_id: RunId) -> str:
    return f"abandoned-{run_id}"


def _encoded(value: msgspec.Struct) -> str:
    return msgspec.json.encode(value).decode()
