"""Runs a job in this process: the common part of `scrape` and `demo`
(docs/operations.md, Roles)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

import trio

from actors.runtime import Child, Supervisor, tree
from conveyor import __version__
from conveyor.bootstrap.body_memory import body_memory_mb
from conveyor.bootstrap.runtime import Runtime, open_runtime
from conveyor.cli.progress import Report, note_of
from conveyor.cli.shutdown import cancel_on_signal, end_if_failed
from conveyor.config import Settings
from conveyor.domain import limits
from conveyor.domain.budget import BudgetCap, Price
from conveyor.domain.changes import RunKey
from conveyor.domain.ids import CallerId, JobId
from conveyor.domain.lifecycle import RUN_LIVE
from conveyor.domain.model import HostLimits, Job, Run, Totals
from conveyor.domain.submit.admission import TaskDraft
from conveyor.process_status import RunLine, Snapshot, serve_snapshots
from conveyor.usecases.budget import is_spent
from conveyor.usecases.context import Context
from conveyor.usecases.lookup import totals_of
from conveyor.usecases.run import run_progress
from conveyor.usecases.run.run_progress import load_progress
from conveyor.usecases.submit.jobs import Submission, submit

CALLER = CallerId("local")
# The interval of the progress display. A smaller value costs CPU time that the fetches need.
POLL_S = 0.1
# After the last task the run ends within milliseconds, so the command polls faster.
LAST_LOOK_S = 0.01
# The budget must look spent this many times in a row: a call that is about to begin shows within
# this time.
BROKE_LOOKS = 20
RUNS_SHOWN_MAX = 50


@dataclass(frozen=True, slots=True)
class RunSummary:
    """How a local job ended. `was_cut_off`: a signal came first.

    `done_here` does not count the tasks of an earlier, interrupted command. `is_broke`: the budget
    could pay for no further call.
    """

    job: Job
    run: Run
    totals: Totals
    was_cut_off: bool
    done_here: int
    is_broke: bool = False


@asynccontextmanager
async def running_worker(
    settings: Settings, *, role: str, processes: int = 1
) -> AsyncGenerator[Runtime, None]:
    """Opens a runtime with a running worker and, with `processes` above 1, helper processes.

    It always uses the embedded engine: a local command must not use the shared engine that the
    environment may configure.
    """
    settings = replace(settings, engine="embedded")
    settings = shared_among(settings, processes)
    async with open_runtime(settings, role=role) as world, trio.open_nursery() as nursery:
        supervisor: Supervisor = world.worker(
            inspection_child(world, role, lambda: supervisor),
            *world.helper_processes(processes - 1),
        )
        await nursery.start(supervisor.run)
        nursery.start_soon(end_if_failed, supervisor)
        yield world
        nursery.cancel_scope.cancel()


def shared_among(settings: Settings, processes: int) -> Settings:
    """Divides concurrency and memory among the processes, rounded up."""
    return replace(
        settings,
        concurrency=-(-settings.concurrency // processes),
        body_memory_mb=max(-(-body_memory_mb(settings) // processes), limits.BODY_MEMORY_MB_MIN),
    )


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


def list_id(urls: Sequence[str]) -> str:
    """Returns the name of a list, by which it is found again after an interruption."""
    return hashlib.sha256("\n".join(urls).encode()).hexdigest()[:40]


async def start_job(
    env: Context,
    urls: Sequence[str],
    *,
    concurrency: int,
    attempts: int,
    budget: BudgetCap | None = None,
    host_limits: HostLimits | None = None,
) -> tuple[Job, Run]:
    accepted = await submit(
        env,
        CALLER,
        Submission(
            drafts=[TaskDraft(url=url) for url in urls],
            external_id=list_id(urls),
            max_inflight=concurrency,
            max_attempts=attempts,
            budget=budget,
            host_limits=host_limits,
        ),
        job_id=JobId(env.new_id()),
    )
    return accepted.job, accepted.run


async def watch_run(
    env: Context, job: Job, run: Run, report: Report, *, price: Price | None = None
) -> RunSummary:
    """Shows the progress of a run until it ends, its budget is spent, or a signal arrives."""
    _, at_start = await _look(env, job, run)
    broke_looks = 0
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancel_on_signal, scope, 0)
            while run.status in RUN_LIVE and broke_looks < BROKE_LOOKS:
                run, totals = await _look(env, job, run)
                held_up = (await load_progress(env, run, totals)).waiting_on
                note = "" if held_up is None else note_of(held_up.reason, held_up.detail)
                report(totals.done, totals.failed, run.planned, note)
                broke_looks = broke_looks + 1 if await _is_broke(env, run, price) else 0
                is_drained = 0 < run.planned <= totals.done
                await trio.sleep(LAST_LOOK_S if is_drained else POLL_S)
            nursery.cancel_scope.cancel()
    run, totals = await _look(env, job, run)
    report(totals.done, totals.failed, run.planned)
    done_here = totals.done - at_start.done
    is_broke = run.status in RUN_LIVE and not scope.cancelled_caught
    return RunSummary(job, run, totals, scope.cancelled_caught, done_here, is_broke)


async def _is_broke(env: Context, run: Run, price: Price | None) -> bool:
    if run.budget is None or price is None:
        return False
    return await is_spent(env, run, price.in_unit(run.budget.unit))


async def _look(env: Context, job: Job, run: Run) -> tuple[Run, Totals]:
    current = await env.store.read(RunKey(job.job_id, run.run_id))
    assert current is not None
    return current, await totals_of(env, current)
