"""The snapshot of a process, which `conveyor ps` shows (docs/operations.md, Roles)."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from actors.runtime import Child, Supervisor, tree
from conveyor import __version__
from conveyor.bootstrap.runtime import Runtime
from conveyor.process_status import RunLine, Snapshot, serve_snapshots
from conveyor.usecases.context import Context
from conveyor.usecases.run import run_progress

RUNS_SHOWN_MAX = 50


def inspection_child(world: Runtime, role: str, supervisor: Callable[[], Supervisor]) -> Child:
    async def take() -> Snapshot:
        return await snapshot(world, role, supervisor())

    return Child(
        "inspection",
        run=partial(serve_snapshots, world.settings.data_dir, take),
        reports_ready=True,
    )


async def run_lines(env: Context) -> list[RunLine]:
    """Returns the live runs, for display."""
    return [
        RunLine(
            job_id=live.run.job_id,
            run_id=live.run.run_id,
            status=live.status,
            total=live.run.planned,
            completed=live.totals.done,
            successful=live.totals.successful,
            failed=live.totals.failed,
            waiting_on=None if (held := live.outlook.waiting_on) is None else held.reason,
            waiting_detail=None if held is None else held.detail,
            eta_s=live.outlook.eta_s,
        )
        for live in await run_progress.live_runs(env, limit=RUNS_SHOWN_MAX)
    ]


async def snapshot(world: Runtime, role: str, supervisor: Supervisor) -> Snapshot:
    runs = await run_lines(world.env)
    return Snapshot(
        pid=os.getpid(),
        role=role,
        version=__version__,
        inflight=world.limiter.inflight_count,
        capacity=world.limiter.slots_count,
        tree=tree(supervisor),
        runs=runs,
    )
