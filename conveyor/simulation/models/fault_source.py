"""Draws the faults of modelled services and counts them; all models of a world share one source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from conveyor.domain.ids import Random
from conveyor.simulation.models.fault_rates import CALM, FAULTS, FaultRates, Span

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class FaultSource:
    """`service_rates` has the current fault rates and may be replaced while the world runs.
    `fault_counts` counts the faults by name."""

    random: Random
    service_rates: FaultRates = CALM
    fault_counts: Counter[str] = field(default_factory=Counter)

    def occurs(self, name: str, rate: float) -> bool:
        if rate <= 0.0 or self.random.uniform(0.0, 1.0) >= rate:
            return False
        self.count(name)
        return True

    def count(self, name: str) -> None:
        assert name in _NAMES, f"a fault that FAULTS does not list: {name}"
        self.fault_counts[name] += 1

    def seconds(self, span: Span) -> float:
        least, most = span
        return self.random.uniform(least, most) if most > least else least

    def below(self, bound: int) -> int:
        """A random integer from 0 to `bound` - 1."""
        return min(bound - 1, int(self.random.uniform(0.0, bound)))

    def one_of(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]


_NAMES = frozenset(FAULTS)
