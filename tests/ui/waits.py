"""Creates each wait reason of a run, without workers."""

from __future__ import annotations

import re
from typing import Any

import trio

from conveyor.domain.errors import make_problem
from conveyor.domain.model import FailureReason, Task
from conveyor.domain.run.wait_reason import RunReport, WaitReason, WorkerReport
from conveyor.ports.gateway import NotScraped
from conveyor.ui.render import STATIC
from conveyor.usecases.lookup import load_owned_job
from conveyor.usecases.run import tasks
from conveyor.usecases.run.run_progress import publish_presence, publish_reports
from tests.api.world import World
from tests.ui.world import Answer, Browser, make_ui_world


async def a_page_that_shows(reason: WaitReason) -> Answer:
    """The page of a run that waits for this reason, as its caller sees it."""
    config: dict[str, Any] = {"sync_tasks_max": 1, "at_once_max": 1} if reason == "ingest" else {}
    world = make_ui_world(**config)
    anna = Browser(world)
    await anna.sign_in()
    submitted = await world.submit(2, max_inflight=1)
    job_id, run_id = submitted["job_id"], submitted["latest_run"]["run_id"]
    await bring_about(world, job_id, run_id, reason)
    return await anna.open(f"/ui/jobs/{job_id}/runs/{run_id}")


async def bring_about(world: World, job_id: str, run_id: str, reason: WaitReason) -> None:
    """Makes the run wait: through the report of a worker, or through rows and leases."""
    env = world.env
    run = await world.run(job_id, run_id)
    workers = WorkerReport(10, 10)
    match reason:
        case WaitReason.PAUSED:
            await world.post(f"/v1/jobs/{job_id}/pause")
        case WaitReason.NO_WORKERS | WaitReason.INGEST:
            return
        case WaitReason.JOB_CAP:
            await env.coordinator.acquire(run.job_id, run.run_id, count_max=1, cap=1, ttl_s=30)
            await publish_presence(env, workers)
        case WaitReason.RATE_LIMITED | WaitReason.RETRY_BACKOFF:
            for task in await world.tasks_of(job_id, run_id):
                await _fail_attempt(world, job_id, task)
            await publish_presence(env, workers)
            await publish_reports(env, {run.run_id: RunReport(reason=reason)})
        case _:
            await publish_presence(env, workers)
            await publish_reports(env, {run.run_id: RunReport(reason=reason)})


async def _fail_attempt(world: World, job_id: str, task: Task) -> None:
    """Fails an attempt of a task that will be retried."""
    ref, held = await world.claim(job_id, task)
    problem = make_problem("target_rate_limited", "Too many requests", 429)
    miss = NotScraped(reason=FailureReason.RATE_LIMITED, problem=problem, retryable=True)
    job = await load_owned_job(world.env, (await world.run(job_id, task.run_id)).caller, job_id)
    await world.env.commit(tasks.judge_failure(world.env, job, ref, held, miss).change)


def boxes_of_all_reasons() -> str:
    """One page with the boxes of all reasons, each taken from the page of a run."""

    async def take() -> list[str]:
        boxes: list[str] = []
        for reason in WaitReason:
            page = await a_page_that_shows(reason)
            box = re.search(r'<section class="box warn".*?</section>', page.text, re.DOTALL)
            assert box is not None, reason
            boxes.append(box[0])
        return boxes

    style = (STATIC / "app.css").read_text(encoding="utf-8")
    return (
        f'<html lang="en"><style>{style}</style><main><h1>Why a run waits</h1>'
        f"{''.join(trio.run(take))}</main></html>"
    )
