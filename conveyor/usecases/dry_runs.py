"""Dry runs: what a submit or a rerun would do, and what it would cost; nothing is kept
(docs/api.md, Dry run)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import aclosing

import msgspec
import trio

from conveyor.domain import limits, pricing, submission
from conveyor.domain.errors import InvalidTask
from conveyor.domain.ids import CallerId, RunId
from conveyor.domain.model import JobType, Run
from conveyor.domain.pricing import FREE, Price
from conveyor.domain.submission import Refusal
from conveyor.usecases.choosing import Choice, Chosen, count_row
from conveyor.usecases.env import Env
from conveyor.usecases.jobs import Submission
from conveyor.usecases.lookups import own_job
from conveyor.usecases.reruns import ended_run
from conveyor.usecases.walking import pages_of


class SubmitPreview(msgspec.Struct, frozen=True, kw_only=True):
    """Lines that would be taken and lines that would not, each kind of the latter counted."""

    valid: int
    reasons: dict[str, int]
    invalid_tasks: list[InvalidTask]
    price: Price

    @property
    def invalid(self) -> int:
        return sum(self.reasons.values())


class RerunPreview(msgspec.Struct, frozen=True, kw_only=True):
    """Tasks that would start over and tasks that would be inherited."""

    rerun_of: RunId | None
    retried: int
    inherited: int
    price: Price | None


async def preview_submit(env: Env, request: Submission) -> SubmitPreview:
    """Judges every line as a submit would, which was rehearsed before."""
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
    )


async def preview_rerun(
    env: Env, caller: CallerId, job_id: str, choice: Choice, run: Run
) -> RerunPreview:
    """Reads every row of the latest run, which `run` would begin anew. One whose lists were never
    all in tells no price, and neither does the list of a scheduled job."""
    job = await own_job(env, caller, job_id)
    if job.type is JobType.SCHEDULED and choice.is_everything:
        return RerunPreview(rerun_of=run.rerun_of, retried=run.planned, inherited=0, price=None)
    previous = await ended_run(env, job, choice)
    if previous.open_batches:
        return RerunPreview(rerun_of=previous.run_id, retried=run.planned, inherited=0, price=None)
    source, chosen, price = choice.of(previous), Chosen(), FREE
    async with aclosing(pages_of(env, previous)) as pages:
        async for page in pages:
            for row in page:
                if count_row(chosen, row, source):
                    price += _price(env, {**job.params, **(row.params or {})})
    return RerunPreview(
        rerun_of=previous.run_id,
        retried=chosen.restarted,
        inherited=previous.total - chosen.restarted,
        price=price,
    )


def _price(env: Env, params: Mapping[str, str]) -> Price:
    """What we fetch ourselves costs no credits."""
    return pricing.price_of(params) if env.policy.targets is None else FREE
