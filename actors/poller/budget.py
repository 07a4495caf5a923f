"""Purse: pays for the calls of one poller out of the budget of its run (SPEC.md 4.9).

What it holds is on the run's books as its share, before any call begins; so the run as a whole
never spends more than its budget, whoever dies when.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from conveyor.domain.backpressure import reservation
from conveyor.domain.backpressure.budget import Budget, BudgetReservation, Unit
from conveyor.domain.changes import Applied, BudgetKey, Missing, Verdict
from conveyor.domain.model import Run
from conveyor.ports.gateway import Outcome
from conveyor.telemetry import Metrics
from conveyor.usecases.context import Context

log = logging.getLogger(__name__)

_TRIES = 20


@dataclass(slots=True, eq=False)
class CallReservation:
    """What one call was given to spend, and what it spent: all of it from the moment it begins,
    since a call that is cut off may have been billed, until it is known to be less."""

    unit: Unit
    price: int
    spent: int = 0

    def start(self) -> None:
        self.spent = self.price

    def finish(self, outcome: Outcome) -> None:
        if outcome.cost_known:
            is_credits = self.unit is Unit.CREDITS
            self.spent = outcome.credits if is_credits else outcome.cost_micros


class BudgetReservations:
    """One poller's share of a budget: `promised` to calls under way, `spent` by those that ended.

    The share is never below the two together. One caller at a time may `pay` or `settle`; tolls
    come back whenever they like.
    """

    def __init__(self, env: Context, run: Run, unit: Unit, metrics: Metrics) -> None:
        self.unit = unit
        self._env = env
        self._metrics = metrics
        self._share = BudgetReservation(run.job_id, run.run_id, holder=env.new_id(), taken=0, seq=0)
        self._is_sure = True
        self._promised = 0
        self._spent = 0

    async def available(self) -> int:
        """How much more could be promised, as things stand."""
        budget = await self._env.store.read(BudgetKey(self._share.job_id, self._share.run_id))
        return self._available(0 if budget is None else budget.left)

    async def reserve(self, prices: Sequence[int]) -> list[CallReservation | None]:
        """Takes what these calls may cost; None for those that the budget has nothing left for."""
        paid = [True] * len(prices)
        for _ in range(_TRIES):
            need = sum(price for price, fits in zip(prices, paid, strict=True) if fits)
            if need == 0:
                break
            verdict = await self._resize(self._promised + self._spent + need)
            if isinstance(verdict, Applied):
                self._promised += need
                return [
                    CallReservation(self.unit, price) if fits else None
                    for price, fits in zip(prices, paid, strict=True)
                ]
            if isinstance(verdict, Missing):
                return [None] * len(prices)
            if isinstance(verdict.row, Budget):
                paid = reservation.affordable(prices, self._available(verdict.row.left))
        return [CallReservation(self.unit, 0) if price == 0 else None for price in prices]

    def close(self, reservation: CallReservation) -> None:
        """The call is over: what it did not spend can pay for others."""
        self._promised -= reservation.price
        self._spent += reservation.spent
        if reservation.spent > reservation.price:
            self._metrics.invariant_violations.labels("call_price").inc()
            log.error(
                "a gateway call cost more than its reservation",
                extra={
                    "run": self._share.run_id,
                    "price": reservation.price,
                    "cost": reservation.spent,
                },
            )

    async def return_unused(self) -> None:
        """Gives back what is promised to nobody."""
        for _ in range(_TRIES):
            if isinstance(await self._resize(self._promised + self._spent), Applied | Missing):
                return

    def _available(self, left: int) -> int:
        return max(0, left + self._share.taken - self._promised - self._spent)

    async def _resize(self, taken: int) -> Verdict:
        """One step of the share to another size. A refusal may be by our own earlier step, whose
        outcome nobody knew: then the row tells how large the share is."""
        share = self._share
        if taken == share.taken and self._is_sure:
            return Applied(())
        self._is_sure = False  # Until there is an answer.
        is_owed = taken <= self._promised + self._spent
        change = (reservation.force_resize if is_owed else reservation.resize)(share, taken=taken)
        verdict = await self._env.commit(change)
        self._is_sure = True
        if isinstance(verdict, Applied):
            self._share = BudgetReservation(
                share.job_id, share.run_id, share.holder, taken, share.seq + 1
            )
        elif not isinstance(verdict, Missing) and isinstance(verdict.row, BudgetReservation):
            self._share = verdict.row
        return verdict
