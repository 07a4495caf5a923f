"""Dry runs over HTTP: `dry_run=true` on a submit or a rerun (SPEC 4.10)."""

from __future__ import annotations

from conveyor.api.call import Call, Reply, json_reply
from conveyor.domain.pricing import Price
from conveyor.usecases import dry_runs
from conveyor.usecases.choosing import Choice
from conveyor.usecases.jobs import Submission
from conveyor.wire.responses import Estimate, RerunDryRunResponse, SubmitDryRunResponse


async def submit(call: Call, asked: Submission, _: str) -> Reply:
    seen = await dry_runs.preview_submit(call.env, asked)
    body = SubmitDryRunResponse(
        dry_run=True,
        would_answer=400 if seen.invalid else 202 if seen.is_later else 201,
        valid_tasks=seen.valid,
        invalid_tasks_count=seen.invalid,
        invalid_reasons=seen.reasons,
        invalid_tasks=seen.invalid_tasks,
        estimate=_estimate(seen.price),
    )
    return json_reply(body)


async def rerun(call: Call, choice: Choice, _: str) -> Reply:
    seen = await dry_runs.preview_rerun(call.env, call.caller, call.ids["job_id"], choice)
    body = RerunDryRunResponse(
        dry_run=True,
        would_answer=202 if seen.is_later else 201,
        rerun_of=seen.rerun_of,
        retried_tasks=seen.retried,
        inherited_tasks=seen.inherited,
        estimate=None if seen.price is None else _estimate(seen.price),
    )
    return json_reply(body)


def _estimate(price: Price) -> Estimate:
    return Estimate(credits_min=price.credits_min, credits_max=price.credits_max)
