"""Budgets: which can be set and changed, and the budget of a rerun."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from conveyor.domain.budget import BudgetCap, Unit
from conveyor.domain.changes import BudgetKey, Change, Verdict
from conveyor.domain.errors import Conflict, InvalidArgument, NotFound
from conveyor.domain.ids import RunId
from conveyor.domain.model import Run
from conveyor.ports.store import Store
from conveyor.usecases import budget
from conveyor.usecases.context import Context
from conveyor.usecases.run.rerun import rerun
from tests.builders import CALLER, a_budget, a_change, add
from tests.usecases.faults import Fault, When, with_fault
from tests.usecases.world import OTHER_CALLER, World, run_of, submit, work

HUNDRED = BudgetCap(Unit.CREDITS, 100)


async def _reserve(env: Context, run: Run, amount: int) -> None:
    """A worker reserves this much of the run's budget."""
    row = a_budget(run.run_id, job_id=run.job_id)
    await env.store.commit([a_change(add(row, left=-amount))])


async def _budget(env: Context, run: Run) -> tuple[int, int] | None:
    row = await env.store.read(BudgetKey(run.job_id, run.run_id))
    return None if row is None else (row.cap, row.left)


async def test_a_run_starts_with_all_of_its_budget(world: World) -> None:
    accepted = await submit(world.env, 3, budget=HUNDRED)

    assert await _budget(world.env, accepted.run) == (100, 100)


async def test_a_raised_budget_keeps_its_reservations_and_signals_the_workers(
    world: World,
) -> None:
    accepted = await submit(world.env, 3, budget=HUNDRED)
    await _reserve(world.env, accepted.run, 60)

    job = await budget.set_cap(world.env, CALLER, accepted.job.job_id, BudgetCap(Unit.CREDITS, 250))

    assert await _budget(world.env, accepted.run) == (250, 190)
    run = await run_of(world.env, accepted.run)
    assert job.budget == run.budget == BudgetCap(Unit.CREDITS, 250)
    assert world.signals.said[-1] == ("run_changed", run.run_id)


async def test_setting_a_budget_again_changes_nothing(world: World) -> None:
    accepted = await submit(world.env, 3, budget=HUNDRED)
    cap = BudgetCap(Unit.CREDITS, 250)
    faulty = with_fault(world.env, Fault(1, When.AFTER, only="commit"))
    with pytest.raises(Exception, match="it happened"):
        await budget.set_cap(faulty, CALLER, accepted.job.job_id, cap)

    await budget.set_cap(world.env, CALLER, accepted.job.job_id, cap)

    assert await _budget(world.env, accepted.run) == (250, 250)


async def test_a_budget_can_be_lowered_to_what_is_reserved_and_no_further(world: World) -> None:
    accepted = await submit(world.env, 3, budget=HUNDRED)
    await _reserve(world.env, accepted.run, 60)

    await budget.set_cap(world.env, CALLER, accepted.job.job_id, BudgetCap(Unit.CREDITS, 60))
    with pytest.raises(Conflict) as refused:
        await budget.set_cap(world.env, CALLER, accepted.job.job_id, BudgetCap(Unit.CREDITS, 59))

    assert refused.value.code == "budget_already_spent"
    assert await _budget(world.env, accepted.run) == (60, 0)


async def test_the_unit_of_a_live_runs_budget_cannot_be_changed(world: World) -> None:
    accepted = await submit(world.env, 3, budget=HUNDRED)

    with pytest.raises(InvalidArgument):
        await budget.set_cap(world.env, CALLER, accepted.job.job_id, BudgetCap(Unit.COST, 999))


async def test_a_budget_cannot_be_added_to_a_live_run(world: World) -> None:
    accepted = await submit(world.env, 3)

    with pytest.raises(Conflict) as refused:
        await budget.set_cap(world.env, CALLER, accepted.job.job_id, HUNDRED)

    assert refused.value.code == "run_has_no_budget"


async def test_a_rerun_starts_with_the_current_budget_of_the_job(world: World) -> None:
    env = world.env
    accepted = await submit(env, 3)
    await work(env, accepted.run)
    await budget.set_cap(env, CALLER, accepted.job.job_id, HUNDRED)

    again = await rerun(env, CALLER, accepted.job.job_id, retry=None, run_id=RunId(env.new_id()))

    assert await _budget(env, again.run) == (100, 100)
    assert await _budget(env, accepted.run) is None


async def test_a_budget_in_money_needs_a_gateway_with_prices_in_money(world: World) -> None:
    env = replace(world.env, config=replace(world.env.config, knows_costs=False))

    with pytest.raises(InvalidArgument, match="credits"):
        await submit(env, 3, budget=BudgetCap(Unit.COST, 1))


async def test_a_budget_of_another_caller_is_not_found(world: World) -> None:
    accepted = await submit(world.env, 3, budget=HUNDRED)

    with pytest.raises(NotFound):
        await budget.set_cap(world.env, OTHER_CALLER, accepted.job.job_id, HUNDRED)


@dataclass(frozen=True, slots=True)
class ReservedMeanwhile:
    """A worker reserves after the budget row was read and before the cap is written."""

    inner: Store
    run: Run
    amount: int
    taken: list[int] = field(default_factory=list)

    async def commit(self, changes: Sequence[Change]) -> list[Verdict]:
        if not self.taken:
            self.taken.append(self.amount)
            row = a_budget(self.run.run_id, job_id=self.run.job_id)
            await self.inner.commit([a_change(add(row, left=-self.amount))])
        return await self.inner.commit(changes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


async def test_a_cap_below_a_concurrent_reservation_is_refused(world: World) -> None:
    accepted = await submit(world.env, 3, budget=HUNDRED)
    racing = ReservedMeanwhile(world.env.store, accepted.run, 60)

    with pytest.raises(Conflict) as refused:
        await budget.set_cap(
            replace(world.env, store=racing),
            CALLER,
            accepted.job.job_id,
            BudgetCap(Unit.CREDITS, 50),
        )

    assert refused.value.code == "budget_already_spent"
    assert await _budget(world.env, accepted.run) == (100, 40)


async def test_a_cap_above_a_concurrent_reservation_is_set(world: World) -> None:
    accepted = await submit(world.env, 3, budget=HUNDRED)
    racing = ReservedMeanwhile(world.env.store, accepted.run, 60)

    await budget.set_cap(
        replace(world.env, store=racing),
        CALLER,
        accepted.job.job_id,
        BudgetCap(Unit.CREDITS, 70),
    )

    assert await _budget(world.env, accepted.run) == (70, 10)
