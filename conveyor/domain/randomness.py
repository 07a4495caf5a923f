"""Randomness is an argument: what the domain asks of it, which `random.Random` has."""

from __future__ import annotations

from typing import Protocol


class Random(Protocol):
    def uniform(self, a: float, b: float, /) -> float: ...

    def getrandbits(self, k: int, /) -> int: ...
