"""Runs Trio deterministically: with a seeded scheduler and a virtual clock (docs/simulator.md, How
a world runs).

This is the only module that uses private attributes of Trio: Trio has no public way to seed its
scheduler. Code that runs under it must not enter a thread, because virtual time does not wait for
threads.
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
    """No task can run, and no deadline is left that would wake one."""


class JumpClock(trio.abc.Clock):
    """A virtual clock: when no task can run, it jumps to the next deadline."""

    def __init__(self) -> None:
        self._now = 0.0

    def start_clock(self) -> None:
        """Does nothing: virtual time moves only when Trio asks how long to sleep."""

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
    """Runs `main` as `trio.run` would, with virtual time. The same seed gives the same
    execution."""
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
    """Disables the garbage collector while the world runs.

    When the collector runs depends on earlier allocations of the process, and finalizers that it
    calls may schedule tasks. Both would make a replay differ.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
