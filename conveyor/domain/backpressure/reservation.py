"""Reserves a part of a run's budget before a call, and returns the unused part (SPEC.md 4.9).

Before it calls a gateway, a poller reserves the most that the call may cost. Only the holder of a
reservation can return it. If the holder crashes, its reservation is lost, and the budget is still
never exceeded.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from conveyor.domain.budget import Budget, BudgetCap, BudgetReservation
from conveyor.domain.changes import (
    ANY,
    BudgetKey,
    Change,
    Guard,
    Insert,
    JobKey,
    RunKey,
    ShareKey,
    Update,
    Write,
)
from conveyor.domain.lifecycle import JOB_VISIBLE, RUN_LIVE
from conveyor.domain.model import Job, Run


def resize(share: BudgetReservation, *, taken: int) -> Change:
    """Changes the reservation to `taken`. The budget's `left` changes by the difference.

    The store can refuse only an increase, if `left` is too small.
    """
    more = taken - share.taken
    resized = msgspec.structs.replace(share, taken=taken, seq=share.seq + 1)
    key = ShareKey(share.job_id, share.run_id, share.holder)
    mine = Guard(equals=(("seq", share.seq),))
    values = {"taken": resized.taken, "seq": resized.seq}
    return Change(
        (
            Update(key, mine, values) if share.seq else Insert(key, resized),
            Update(
                BudgetKey(share.job_id, share.run_id),
                Guard(at_least=("left", more)) if more > 0 else ANY,
                {},
                {"left": -more},
            ),
        )
    )


def force_resize(share: BudgetReservation, *, taken: int) -> Change:
    """Records actual spend even if it exceeds the reservation. `left` may become negative."""
    change = resize(share, taken=taken)
    held, budget = change.writes
    assert isinstance(budget, Update)
    return Change((held, msgspec.structs.replace(budget, guard=ANY)))


def affordable(prices: Sequence[int], room: int) -> list[bool]:
    """Returns for each call, in order, whether the remaining budget can pay for it."""
    paid = []
    for price in prices:
        paid.append(price <= room)
        room -= price if paid[-1] else 0
    return paid


def set_cap(job: Job, run: Run | None, budget: Budget | None, cap: BudgetCap, now: float) -> Change:
    """Changes the cap of the job and of its active run. Existing reservations stay."""
    values = {"budget": cap, "updated_at": now}
    active = None if run is None else run.run_id
    guard = Guard(status_in=JOB_VISIBLE, equals=(("active_run_id", active),))
    writes: list[Write] = [Update(JobKey(job.job_id), guard, values)]
    if run is not None and budget is not None:
        more = cap.amount - budget.cap
        still = Guard(equals=(("cap", budget.cap),), at_least=("left", -more))
        writes += [
            Update(RunKey(run.job_id, run.run_id), Guard(status_in=RUN_LIVE), values),
            Update(BudgetKey(run.job_id, run.run_id), still, {}, {"cap": more, "left": more}),
        ]
    return Change(tuple(writes))
