"""Clocks: the machine's, and a virtual one that follows Trio's clock (SPEC.md 4.22)."""

from __future__ import annotations

import time
from dataclasses import dataclass

import trio


class SystemClock:
    def now(self) -> float:
        return time.time()

    def steady(self) -> float:
        # All processes of a machine see the same monotonic clock, and setting the wall clock does
        # not change it.
        return time.monotonic()


@dataclass(frozen=True, slots=True)
class VirtualClock:
    """Wall time derived from Trio's clock, so that one virtual clock drives sleeps and instants."""

    epoch_s: float

    def now(self) -> float:
        return self.epoch_s + trio.current_time()

    def steady(self) -> float:
        return self.epoch_s + trio.current_time()
