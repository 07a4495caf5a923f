"""ClockStepDetector: tells an actor that the wall clock of its machine was set (SPEC.md 4.22)."""

from __future__ import annotations

from conveyor.domain import limits
from conveyor.ports.clock import Clock


class ClockStepDetector:
    """Compares the wall clock with one that is never set."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset_s = clock.now() - clock.steady()

    def was_set_back(self) -> bool:
        """Whether the clock was set back since this was last asked; what it gains or loses while it
        runs is no step."""
        before, self._offset_s = self._offset_s, self._clock.now() - self._clock.steady()
        return before - self._offset_s > limits.CLOCK_SKEW_S
