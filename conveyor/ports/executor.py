"""Executor: runs work that blocks or computes for long, so that it does not block the event loop
(SPEC.md 4.19)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Executor(Protocol):
    """Laws:

    - Returns what the work returns, and raises what it raises.
    - A cancelled call returns only after the work has ended, so that its inputs may be used again.
    """

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Runs work that shares no mutable data with other running code."""
