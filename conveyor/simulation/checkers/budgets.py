"""Budgets: shares and what is left add up to the cap, and no run spends above it (I65)."""

from __future__ import annotations

from collections.abc import Iterator

from conveyor.domain.budget import Budget, Unit
from conveyor.domain.changes import BudgetKey, ShareKey
from conveyor.simulation.watcher import Moment


def a_budget_adds_up_to_its_cap(moment: Moment) -> Iterator[str]:
    """I65: nothing is left below 0, and what is left and all shares add up to the cap, also while
    the cap is changed."""
    run_ids = {
        (change.new or change.old).run_id
        for kind in (BudgetKey, ShareKey)
        for change in moment.changed(kind)
    }
    for budget in _budgets(moment):
        run = moment.after.run_by_id.get(budget.run_id)
        if budget.run_id not in run_ids or run is None or moment.is_deleted(run):
            continue
        taken = sum(
            share.taken
            for share in moment.after.rows[ShareKey].values()
            if share.run_id == budget.run_id
        )
        if budget.left < 0 or budget.left + taken != budget.cap:
            told = f"{budget.left} left and {taken} taken of {budget.cap}"
            yield f"the budget of run {budget.run_id} does not add up: {told}"


def no_run_spends_above_its_cap(moment: Moment) -> Iterator[str]:
    """I65: the gateway bills no run for more than its budget."""
    billed: dict[str, int] = {}
    for fetch in moment.history.fetches:
        billed[fetch.run_id] = billed.get(fetch.run_id, 0) + fetch.credits_billed
    for budget in _budgets(moment):
        spent = billed.get(budget.run_id, 0)
        if budget.unit is Unit.CREDITS and spent > budget.cap:
            yield f"run {budget.run_id} was billed {spent} of {budget.cap} credits"


def _budgets(moment: Moment) -> Iterator[Budget]:
    yield from moment.after.rows[BudgetKey].values()
