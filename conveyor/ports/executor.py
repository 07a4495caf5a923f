"""Aside: heavy computing that must not hold up everybody else (SPEC.md 4.19)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Executor(Protocol):
    """Laws:

    - Answers what the work answers, and raises what it raises.
    - A cancelled call returns only once the work has ended: what it uses is free again.
    """

    async def run(self, work: Callable[[], T]) -> T:
        """Does work that touches nothing which anybody else touches meanwhile."""
