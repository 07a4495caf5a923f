"""The clocks on the walls of a simulated world: each a little wrong in its own way."""

from __future__ import annotations

from dataclasses import dataclass

import trio

EPOCH_S = 1_700_000_000.0


@dataclass(slots=True)
class WallClock:
    """Epoch seconds by virtual time; `offset_s` and `drift` are how wrong it is."""

    offset_s: float = 0.0
    drift: float = 0.0

    def now(self) -> float:
        passed_s = trio.current_time()
        return EPOCH_S + passed_s * (1.0 + self.drift) + self.offset_s

    def steady(self) -> float:
        """What no step, offset or drift of the wall clock reaches."""
        return EPOCH_S + trio.current_time()

    def step(self, seconds: float) -> None:
        self.offset_s += seconds

    def set_right(self) -> None:
        self.offset_s = self.drift = 0.0
