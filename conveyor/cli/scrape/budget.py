"""The budget of a scrape: what it has spent, and what the calls in flight may still cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from conveyor.cli.scrape.pages import Answer, Page
from conveyor.domain.budget import BudgetCap, Price, Unit

# The bound on the disk is raised by so many calls at a time, so that few calls write to the disk.
CALLS_AHEAD = 100


class SpendingLimit:
    """`save` gets a bound on what was spent before any call that could pass the last bound.

    After a kill the bound counts as spent, because nobody knows what the calls in flight cost.
    """

    def __init__(
        self,
        cap: BudgetCap,
        price: Callable[[Mapping[str, str]], Price],
        params: Mapping[str, str],
        spent: int,
        save: Callable[[int], None],
    ) -> None:
        self._cap = cap
        self._price = price
        self._params = params
        self._save = save
        self.spent = spent
        self._reserved = 0
        self._bound = spent

    def reserve(self, page: Page) -> bool:
        """Reserves the price of one call. Returns False if the budget cannot pay for it."""
        price = self._price_of(page)
        committed = self.spent + self._reserved + price
        if committed > self._cap.amount:
            return False
        if committed > self._bound:
            self._bound = min(committed + CALLS_AHEAD * price, self._cap.amount)
            self._save(self._bound)
        self._reserved += price
        return True

    def spend(self, page: Page, answer: Answer) -> None:
        price = self._price_of(page)
        self._reserved -= price
        if self._cap.unit is Unit.CREDITS:
            self.spent += answer.credits
        else:
            self.spent += answer.cost_micros if answer.is_cost_known else price

    def close(self) -> None:
        """Saves what was spent; calls that were cut off count at their price."""
        self._save(self.spent + self._reserved)

    def _price_of(self, page: Page) -> int:
        params = {**self._params, **page.params} if page.params else self._params
        return self._price(params).in_unit(self._cap.unit)
