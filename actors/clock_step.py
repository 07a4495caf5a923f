"""ClockStepDetector: detects that the wall clock of this machine was set back (SPEC.md 4.22)."""

from __future__ import annotations

from conveyor.domain import limits
from conveyor.ports.clock import Clock


class ClockStepDetector:
    """Compares the wall clock with a clock that is never set."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset_s = clock.now() - clock.steady()

    def was_set_back(self) -> bool:
        """Returns whether the clock was set back since the last call. Ordinary drift is not a
        step."""
        before, self._offset_s = self._offset_s, self._clock.now() - self._clock.steady()
        # Smaller steps are within the difference that all deadlines tolerate.
        return before - self._offset_s > limits.CLOCK_SKEW_S
