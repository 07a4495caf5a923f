"""Clocks: the machine's, and one that follows Trio's (SPEC.md 4.22)."""

from __future__ import annotations

import time
from dataclasses import dataclass

import trio


class SystemClock:
    def now(self) -> float:
        return time.time()

    def steady(self) -> float:
        return time.monotonic()


@dataclass(frozen=True, slots=True)
class VirtualClock:
    """Wall time derived from Trio's, so that one virtual clock drives both sleeps and instants."""

    epoch_s: float

    def now(self) -> float:
        return self.epoch_s + trio.current_time()

    def steady(self) -> float:
        return self.epoch_s + trio.current_time()
