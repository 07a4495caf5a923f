"""Runs one list on the embedded engine in this process, for benches that measure the cost of a page
without the API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import trio

from actors.runtime import Supervisor
from conveyor.bootstrap.runtime import Runtime, open_runtime
from conveyor.cli.roles import shared_among
from conveyor.cli.shutdown import end_if_failed
from conveyor.cli.snapshot import inspection_child
from conveyor.config import Settings
from conveyor.domain.changes import RunKey
from conveyor.domain.ids import CallerId, JobId
from conveyor.domain.lifecycle import RUN_LIVE
from conveyor.domain.model import Run, Totals
from conveyor.domain.submit.admission import TaskDraft
from conveyor.usecases.context import Context
from conveyor.usecases.lookup import totals_of
from conveyor.usecases.submit.jobs import Submission, submit

CALLER = CallerId("local")
POLL_S = 0.1
# The run ends milliseconds after its last task, so the last polls are close together.
LAST_POLL_S = 0.01


@asynccontextmanager
async def running_worker(
    settings: Settings, *, role: str, processes: int = 1
) -> AsyncGenerator[Runtime, None]:
    """Opens a runtime with a running worker and, with `processes` above 1, helper processes. It
    always uses the embedded engine, whatever the environment configures."""
    settings = shared_among(replace(settings, engine="embedded"), processes)
    async with open_runtime(settings, role=role) as world, trio.open_nursery() as nursery:
        supervisor: Supervisor = world.worker(
            inspection_child(world, role, lambda: supervisor),
            *world.helper_processes(processes - 1),
        )
        await nursery.start(supervisor.run)
        nursery.start_soon(end_if_failed, supervisor)
        yield world
        nursery.cancel_scope.cancel()


async def start_run(env: Context, urls: Sequence[str], *, concurrency: int, attempts: int) -> Run:
    accepted = await submit(
        env,
        CALLER,
        Submission(
            drafts=[TaskDraft(url=url) for url in urls],
            max_inflight=concurrency,
            max_attempts=attempts,
        ),
        job_id=JobId(env.new_id()),
    )
    return accepted.run


async def wait_for_end(env: Context, run: Run) -> Totals:
    while True:
        current = await env.store.read(RunKey(run.job_id, run.run_id))
        assert current is not None
        totals = await totals_of(env, current)
        if current.status not in RUN_LIVE:
            return totals
        await trio.sleep(LAST_POLL_S if 0 < current.planned <= totals.done else POLL_S)
