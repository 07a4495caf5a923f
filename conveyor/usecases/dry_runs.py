"""Dry runs: what a submit or a rerun would do, and what it would cost; nothing is kept
(SPEC 4.10)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import aclosing

import msgspec
import trio

from conveyor.domain import limits, pricing, submission
from conveyor.domain.admission import Path
from conveyor.domain.errors import Conflict, InvalidTask
from conveyor.domain.ids import CallerId, RunId
from conveyor.domain.pricing import FREE, Price
from conveyor.domain.queries import BatchesOf
from conveyor.domain.submission import Refusal
from conveyor.usecases import expiry
from conveyor.usecases.choosing import Choice, Chosen, count_row
from conveyor.usecases.env import Env
from conveyor.usecases.jobs import Submission, refuse_empty
from conveyor.usecases.lookups import own_job
from conveyor.usecases.reruns import ended_run
from conveyor.usecases.walking import pages_of


class SubmitPreview(msgspec.Struct, frozen=True, kw_only=True):
    """Lines that would be taken and lines that would not, each kind of the latter counted."""

    valid: int
    reasons: dict[str, int]
    invalid_tasks: list[InvalidTask]
    price: Price
    is_later: bool

    @property
    def invalid(self) -> int:
        return sum(self.reasons.values())


class RerunPreview(msgspec.Struct, frozen=True, kw_only=True):
    """Tasks that would start over and tasks that would be inherited."""

    rerun_of: RunId
    retried: int
    inherited: int
    price: Price | None
    is_later: bool


async def preview_submit(env: Env, request: Submission) -> SubmitPreview:
    """Judges every line as a submit would."""
    refuse_empty(request)
    expiry.ttl_days(env, request.result_ttl_days)
    reasons: Counter[str] = Counter()
    shown: list[InvalidTask] = []
    price = FREE
    for index, draft in enumerate(request.drafts):
        if index % limits.CHUNK_TASKS == limits.CHUNK_TASKS - 1:
            await trio.lowlevel.checkpoint()
        try:
            spec, _ = submission.check_task(index, draft, request.params.values, env.policy.targets)
        except Refusal as refusal:
            invalid = submission.invalid_task(index, refusal)
            reasons[invalid.reason] += 1
            if len(shown) < limits.INVALID_TASKS_SHOWN_MAX:
                shown.append(invalid)
        else:
            price += _price(env, {**request.params.values, **(spec.params or {})})
    valid = len(request.drafts) - reasons.total()
    return SubmitPreview(
        valid=valid,
        reasons=dict(reasons),
        invalid_tasks=shown,
        price=price,
        is_later=env.policy.path_for(valid) is Path.LATER,
    )


async def preview_rerun(env: Env, caller: CallerId, job_id: str, choice: Choice) -> RerunPreview:
    """Reads every row of the latest run. One whose lists were never all in tells no price."""
    job = await own_job(env, caller, job_id)
    previous = await ended_run(env, job, choice)
    if previous.open_batches:
        batches = await env.store.find(BatchesOf(job_id=job.job_id, run_id=previous.run_id))
        total = sum(batch.total for batch in batches)
        return RerunPreview(
            rerun_of=previous.run_id, retried=total, inherited=0, price=None, is_later=True
        )
    source, chosen, price = choice.of(previous), Chosen(), FREE
    async with aclosing(pages_of(env, previous)) as pages:
        async for page in pages:
            for row in page:
                if count_row(chosen, row, source):
                    price += _price(env, {**job.params, **(row.params or {})})
    if not chosen.named:
        raise Conflict("No task of the latest run matches the filter.", code="no_matching_tasks")
    return RerunPreview(
        rerun_of=previous.run_id,
        retried=chosen.restarted,
        inherited=previous.total - chosen.restarted,
        price=price,
        is_later=env.policy.path_for(previous.total) is Path.LATER,
    )


def _price(env: Env, params: Mapping[str, str]) -> Price:
    """What we fetch ourselves costs no credits."""
    return pricing.price_of(params) if env.policy.targets is None else FREE
