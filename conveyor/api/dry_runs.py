"""Dry runs over HTTP: `dry_run=true` on a submit or a rerun (docs/api.md, Dry run)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from conveyor.api.call import Call, Reply, Work, json_reply
from conveyor.domain.errors import InvalidTasks
from conveyor.domain.model import Run
from conveyor.domain.pricing import Price
from conveyor.usecases import dry_runs
from conveyor.usecases.choosing import Choice
from conveyor.usecases.env import Env
from conveyor.usecases.jobs import Submission
from conveyor.usecases.rehearsal import Rehearsed, rehearse
from conveyor.wire.responses import Estimate, RerunDryRunResponse, SubmitDryRunResponse


async def submit(
    call: Call, asked: Submission, work_of: Callable[[Call], Work], job_id: str
) -> Reply:
    """A list with bad lines is no refusal here: they are what the caller wants to know."""

    async def work(env: Env) -> None:
        await work_of(_with_env(call, env))(job_id)

    try:
        begun = await rehearse(call.env, work)
    except InvalidTasks:
        begun, would_answer = Rehearsed(), InvalidTasks.status
    else:
        would_answer = _answer_to(begun.run)
    seen = await dry_runs.preview_submit(call.env, asked)
    body = SubmitDryRunResponse(
        dry_run=True,
        would_answer=would_answer,
        valid_tasks=seen.valid if asked.input_id is None else begun.planned,
        invalid_tasks_count=seen.invalid,
        invalid_reasons=seen.reasons,
        invalid_tasks=seen.invalid_tasks,
        estimate=_estimate(seen.price),
    )
    return json_reply(body)


async def rerun(
    call: Call,
    choice: Choice,
    work: Callable[..., Awaitable[Reply]],
    run_id: str,
) -> Reply:
    async def rerun_in(env: Env) -> None:
        await work(_with_env(call, env), run_id=run_id)

    run = (await rehearse(call.env, rerun_in)).run
    assert run is not None
    seen = await dry_runs.preview_rerun(call.env, call.caller, call.ids["job_id"], choice, run)
    body = RerunDryRunResponse(
        dry_run=True,
        would_answer=_answer_to(run),
        rerun_of=seen.rerun_of,
        retried_tasks=seen.retried,
        inherited_tasks=seen.inherited,
        estimate=None if seen.price is None else _estimate(seen.price),
    )
    return json_reply(body)


def _with_env(call: Call, env: Env) -> Call:
    return replace(call, api=replace(call.api, env=env))


def _answer_to(run: Run | None) -> int:
    """A run whose list is ingested after the answer is accepted; any other one is there."""
    return 202 if run is not None and run.ingest_status is not None else 201


def _estimate(price: Price) -> Estimate:
    return Estimate(credits_min=price.credits_min, credits_max=price.credits_max)
