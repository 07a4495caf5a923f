"""A cap that is lowered while workers reserve parts of the budget (I65)."""

from __future__ import annotations

import pytest

from conveyor.domain.backpressure import reservation
from conveyor.domain.budget import BudgetCap, Unit
from conveyor.domain.changes import Applied, BudgetKey
from conveyor.ports.store import Store
from tests.builders import JOB, RUN, T0, a_budget, a_job, a_run, a_share, keep

CAP = BudgetCap(Unit.CREDITS, 100)


@pytest.mark.parametrize(("lowered_to", "is_applied"), [(59, False), (60, True), (61, True)])
async def test_a_cap_is_not_lowered_below_a_reservation_made_since_the_budget_was_read(
    store: Store, lowered_to: int, is_applied: bool
) -> None:
    """The caller reads a full budget and lowers its cap; before the write a worker reserves 60."""
    job, run = a_job(active_run_id=RUN, budget=CAP), a_run(budget=CAP)
    seen = a_budget(cap=100, left=100)
    await keep(store, job, run, seen)
    fresh = a_share(taken=0, seq=0)

    (took,) = await store.commit([reservation.resize(fresh, taken=60)])
    cap = BudgetCap(Unit.CREDITS, lowered_to)
    (lowered,) = await store.commit([reservation.set_cap(job, run, seen, cap, T0)])

    assert isinstance(took, Applied)
    assert isinstance(lowered, Applied) == is_applied
    row = await store.read(BudgetKey(JOB, RUN))
    assert row is not None
    assert (row.cap, row.left) == ((lowered_to, lowered_to - 60) if is_applied else (100, 40))


async def test_a_worker_cannot_reserve_more_than_a_cap_that_was_lowered_since_its_read(
    store: Store,
) -> None:
    """A worker reads the budget; before it reserves, the cap is lowered."""
    job, run = a_job(active_run_id=RUN, budget=CAP), a_run(budget=CAP)
    seen = a_budget(cap=100, left=100)
    await keep(store, job, run, seen)
    cap = BudgetCap(Unit.CREDITS, 50)

    (lowered,) = await store.commit([reservation.set_cap(job, run, seen, cap, T0)])
    (took,) = await store.commit([reservation.resize(a_share(taken=0, seq=0), taken=60)])

    assert isinstance(lowered, Applied)
    assert not isinstance(took, Applied)
    row = await store.read(BudgetKey(JOB, RUN))
    assert row is not None
    assert (row.cap, row.left) == (50, 50)
