"""Kernel: a Trio that does the same twice: seeded scheduling, and time that jumps
(docs/simulator.md, How a world runs).

The one module that touches Trio's private parts. Nothing that runs under it may enter a thread:
time does not wait for threads.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import trio
from trio._core import _run

T = TypeVar("T")


class Deadlock(Exception):
    """Nothing can run, and nothing will ever be due."""


class JumpClock(trio.abc.Clock):
    """Virtual time: when nobody can run it is at once as late as the next deadline."""

    def __init__(self) -> None:
        self._now = 0.0

    def start_clock(self) -> None:
        """Nothing to start: time stands where it is."""

    def current_time(self) -> float:
        return self._now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        # Calls of `run_sync_soon` are due now, but are not in Trio's run queue yet.
        if not _run.GLOBAL_RUN_CONTEXT.runner.entry_queue.size():
            if deadline == math.inf:
                raise Deadlock
            self._now = max(self._now, deadline)
        return 0.0


def run(seed: int, main: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Runs `main` as `trio.run` would; the same seed makes the same history."""
    with _seeded(seed), _no_collector():
        return trio.run(main, *args, clock=JumpClock())


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    hooks: Any = _run
    before = hooks._ALLOW_DETERMINISTIC_SCHEDULING
    hooks._ALLOW_DETERMINISTIC_SCHEDULING = True
    hooks._r.seed(seed)
    try:
        yield
    finally:
        hooks._ALLOW_DETERMINISTIC_SCHEDULING = before


@contextmanager
def _no_collector() -> Iterator[None]:
    """When the collector runs depends on what ran before us, and what it finds may act."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
