"""BudgetReservations: pays for the calls of one poller from the budget of its run (SPEC.md 4.9).

The poller's reservation is written to the store before any call begins. So the run as a whole never
spends more than its budget, whichever process is killed at whichever point.
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

# Other pollers of the run change the same budget row, and each lost race costs one try. After the
# last try the calls count as unaffordable, and the poller tries again later.
_TRIES = 20


@dataclass(slots=True, eq=False)
class CallReservation:
    """The amount that one call may spend, and the amount that it has spent. From the start of the
    call the full price counts as spent, because an interrupted call may have been billed, until the
    cost is known."""

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
    """One poller's reservation of a budget: `promised` for calls in progress, `spent` by ended
    calls.

    The reservation in the store is never below the sum of the two. Only one task at a time may call
    `reserve` or `return_unused`. `close` may be called at any time.
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
        """Reads how much more could be reserved now."""
        budget = await self._env.store.read(BudgetKey(self._share.job_id, self._share.run_id))
        return self._available(0 if budget is None else budget.left)

    async def reserve(self, prices: Sequence[int]) -> list[CallReservation | None]:
        """Reserves the prices of these calls. Returns None for each call that the budget cannot pay
        for."""
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
                # The refusal carries the budget row: drop the calls that it cannot pay for and try
                # again.
                paid = reservation.affordable(prices, self._available(verdict.row.left))
        # Calls without a price need no reservation.
        return [CallReservation(self.unit, 0) if price == 0 else None for price in prices]

    def close(self, reservation: CallReservation) -> None:
        """Ends a call. The part that it did not spend can pay for other calls."""
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
        """Returns the part of the reservation that no call in progress may spend."""
        for _ in range(_TRIES):
            if isinstance(await self._resize(self._promised + self._spent), Applied | Missing):
                return

    def _available(self, left: int) -> int:
        return max(0, left + self._share.taken - self._promised - self._spent)

    async def _resize(self, taken: int) -> Verdict:
        """Changes the size of the reservation by one numbered change. The store may refuse it
        because of an earlier change of this poller whose outcome was unknown; then the returned row
        states the size."""
        share = self._share
        if taken == share.taken and self._is_sure:
            return Applied(())
        self._is_sure = False  # Until the store has answered.
        # Money that is already spent must be recorded even if the budget has nothing left.
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
