"""Overview: what is live right now, for the people who run this process
(docs/operations.md, Endpoints for operators)."""

from __future__ import annotations

import msgspec

from conveyor.domain.lifecycle import RUN_LIVE, seen_status
from conveyor.domain.model import Run, RunStatus
from conveyor.domain.queries import RunsIn
from conveyor.domain.totals import Totals
from conveyor.usecases.env import Env
from conveyor.usecases.lookups import totals_of
from conveyor.usecases.outlook import Outlook, look_at


class LiveRun(msgspec.Struct, frozen=True):
    run: Run
    status: RunStatus
    totals: Totals
    outlook: Outlook


async def live_runs(env: Env, *, limit: int) -> list[LiveRun]:
    found = await env.store.find(RunsIn(statuses=RUN_LIVE, limit=limit))
    live: list[LiveRun] = []
    for run in found:
        totals = await totals_of(env, run)
        seen = await look_at(env, run, totals)
        live.append(LiveRun(run, seen_status(run, totals), totals, seen))
    return live
