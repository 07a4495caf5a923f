"""Dry runs over HTTP: `dry_run=true` on a submit or a rerun (docs/api.md, Dry run)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from conveyor.api.server.request import RequestContext, Response, Work, json_reply
from conveyor.domain.budget import PriceRange
from conveyor.domain.errors import InvalidTasks
from conveyor.domain.model import Run
from conveyor.schemas.responses import Estimate, RerunDryRunResponse, SubmitDryRunResponse
from conveyor.usecases.context import Context
from conveyor.usecases.run.rerun import RerunFilter
from conveyor.usecases.submit import dry_run
from conveyor.usecases.submit.dry_run import Rehearsed, rehearse
from conveyor.usecases.submit.jobs import Submission


async def submit(
    call: RequestContext,
    submission: Submission,
    work_of: Callable[[RequestContext], Work],
    job_id: str,
) -> Response:
    """Runs a submit without storing anything.

    A list with invalid lines is not refused: the response reports them.
    """

    async def work(env: Context) -> None:
        await work_of(_with_env(call, env))(job_id)

    try:
        trial = await rehearse(call.env, work)
    except InvalidTasks:
        trial, would_answer = Rehearsed(), InvalidTasks.status
    else:
        would_answer = _answer_to(trial.run)
    preview = await dry_run.preview_submit(call.env, submission)
    body = SubmitDryRunResponse(
        dry_run=True,
        would_answer=would_answer,
        valid_tasks=preview.valid if submission.input_id is None else trial.planned,
        invalid_tasks_count=preview.invalid,
        invalid_reasons=preview.reasons,
        invalid_tasks=preview.invalid_tasks,
        estimate=_estimate(preview.price),
    )
    return json_reply(body)


async def rerun(
    call: RequestContext,
    choice: RerunFilter,
    work: Callable[..., Awaitable[Response]],
    run_id: str,
) -> Response:
    async def rerun_in(env: Context) -> None:
        await work(_with_env(call, env), run_id=run_id)

    run = (await rehearse(call.env, rerun_in)).run
    assert run is not None
    preview = await dry_run.preview_rerun(call.env, call.caller, call.ids["job_id"], choice, run)
    body = RerunDryRunResponse(
        dry_run=True,
        would_answer=_answer_to(run),
        rerun_of=preview.rerun_of,
        retried_tasks=preview.retried,
        inherited_tasks=preview.inherited,
        estimate=None if preview.price is None else _estimate(preview.price),
    )
    return json_reply(body)


def _with_env(call: RequestContext, env: Context) -> RequestContext:
    return replace(call, api=replace(call.api, env=env))


def _answer_to(run: Run | None) -> int:
    """The status of the real request: 202 if the list is ingested later, else 201."""
    return 202 if run is not None and run.ingest_status is not None else 201


def _estimate(price: PriceRange) -> Estimate:
    return Estimate(credits_min=price.credits_min, credits_max=price.credits_max)
