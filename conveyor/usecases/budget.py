"""Budgets: read what is left of one, and change its cap (SPEC.md 4.9)."""

from __future__ import annotations

from functools import partial

from conveyor.domain.backpressure import reservation
from conveyor.domain.budget import Budget, BudgetCap, Unit
from conveyor.domain.changes import Applied, RunKey
from conveyor.domain.errors import Conflict, InvalidArgument
from conveyor.domain.ids import CallerId
from conveyor.domain.model import Job, Run
from conveyor.usecases.context import AGAIN, Again, Context, retry_or_refuse
from conveyor.usecases.lookup import load_budget, load_owned_job


def check_cap(env: Context, cap: BudgetCap) -> None:
    """Refuses a budget in money if the gateway has no prices in money."""
    if cap.unit is Unit.COST and not env.config.knows_costs:
        raise InvalidArgument(
            "The gateway has no known price in money; give the budget in credits."
        )


async def set_cap(env: Context, caller: CallerId, job_id: str, cap: BudgetCap) -> Job:
    """Changes the cap. A run that waits for its budget continues. A repeated request changes
    nothing."""
    check_cap(env, cap)
    return await retry_or_refuse("The budget is", partial(_try_set_cap, env, caller, job_id, cap))


async def _try_set_cap(env: Context, caller: CallerId, job_id: str, cap: BudgetCap) -> Job | Again:
    job = await load_owned_job(env, caller, job_id)
    run, budget = await _active(env, job)
    if run is not None:
        _refuse_if_unfit(budget, cap)
    change = reservation.set_cap(job, run, budget, cap, env.now())
    if not isinstance(await env.commit(change), Applied):
        return AGAIN
    # Wakes pollers that wait for the budget.
    if run is not None:
        await env.signals.run_changed(run.job_id, run.run_id)
    return await load_owned_job(env, caller, job_id)


async def _active(env: Context, job: Job) -> tuple[Run | None, Budget | None]:
    if job.active_run_id is None:
        return None, None
    run = await env.store.read(RunKey(job.job_id, job.active_run_id))
    return run, None if run is None else await load_budget(env, run)


def _refuse_if_unfit(budget: Budget | None, cap: BudgetCap) -> None:
    if budget is None:
        raise Conflict(
            "The run under way was started without a budget; stop it, or wait for its end.",
            code="run_has_no_budget",
        )
    if budget.unit is not cap.unit:
        raise InvalidArgument(f"The run's budget is in {budget.unit}.")
    if budget.left + cap.amount - budget.cap < 0:
        raise Conflict(
            "More than that is spent already, or promised to calls under way.",
            code="budget_already_spent",
        )
