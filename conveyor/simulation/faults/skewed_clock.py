"""The wall clocks of simulated processes, which may be wrong, drift and leap."""

from __future__ import annotations

from dataclasses import dataclass

import trio

# An arbitrary start of wall time (November 2023), so that times in a trace look like real ones.
EPOCH_S = 1_700_000_000.0


@dataclass(slots=True)
class WallClock:
    """Wall time in seconds since 1970, derived from virtual time; `offset_s` and `drift` are its
    error."""

    offset_s: float = 0.0
    drift: float = 0.0

    def now(self) -> float:
        passed_s = trio.current_time()
        return EPOCH_S + passed_s * (1.0 + self.drift) + self.offset_s

    def steady(self) -> float:
        """A clock that no step, offset or drift changes."""
        return EPOCH_S + trio.current_time()

    def step(self, seconds: float) -> None:
        self.offset_s += seconds

    def set_right(self) -> None:
        self.offset_s = self.drift = 0.0
