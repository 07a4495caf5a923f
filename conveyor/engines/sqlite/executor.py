"""Hands: who does what may block: threads, or a world that has none
(docs/engines.md, Embedded engine).

Everything of this engine that waits for a disk goes through here, so that virtual time, which does
not wait for threads, can do it on the spot instead.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec
import outcome
import trio

from conveyor.engines.sqlite.errors import is_busy
from conveyor.ports.errors import is_resource_shortage

T = TypeVar("T")

_TURN_POLL_S = 0.0003
_TURN_POLLS_MAX = 30_000


class Volume(msgspec.Struct, frozen=True):
    """How much a file system holds, and how much of it may still be used."""

    free_bytes: int
    total_bytes: int


class BlockingExecutor(Protocol):
    """Laws:

    - What `do` and `start` are given is done once, and its outcome comes back on the Trio thread.
    - `start_in_turn` does work that another process may hold up, when that lets it.
    - `linger` is for work that is being done here: it may wait for company.
    - `measure_volume` answers at once, for the volume that holds the directory.
    """

    async def run(
        self, work: Callable[..., T], *arguments: Any, limiter: trio.CapacityLimiter | None = None
    ) -> T: ...

    def start(
        self, work: Callable[[], T], then: Callable[[outcome.Outcome[T]], object]
    ) -> None: ...

    def start_when_unlocked(
        self, work: Callable[[], T], then: Callable[[outcome.Outcome[T]], object]
    ) -> None: ...

    def linger(self, seconds: float) -> None: ...

    def measure_volume(self, directory: str) -> Volume: ...


class ThreadExecutor:
    """The hands of a real process."""

    async def run(
        self, work: Callable[..., T], *arguments: Any, limiter: trio.CapacityLimiter | None = None
    ) -> T:
        try:
            return await trio.to_thread.run_sync(work, *arguments, limiter=limiter)
        except RuntimeError as error:
            if not is_resource_shortage(error):
                raise
            return work(*arguments)  # As in `start`.

    def start(self, work: Callable[[], T], then: Callable[[outcome.Outcome[T]], object]) -> None:
        token = trio.lowlevel.current_trio_token()

        def deliver(result: outcome.Outcome[T]) -> None:
            token.run_sync_soon(then, result)

        try:
            trio.lowlevel.start_thread_soon(work, deliver)
        except RuntimeError as error:
            if not is_resource_shortage(error):
                raise
            # The system gives no thread. Those who wait for the work would wait for ever: it is
            # done here, and holds up everything else for as long as the disk takes.
            deliver(outcome.capture(work))

    def start_when_unlocked(
        self, work: Callable[[], T], then: Callable[[outcome.Outcome[T]], object]
    ) -> None:
        def wait_for_turn() -> T:
            for _ in range(_TURN_POLLS_MAX):
                try:
                    return work()
                except sqlite3.OperationalError as error:
                    if not is_busy(error):
                        raise
                    time.sleep(_TURN_POLL_S)
            return work()

        self.start(wait_for_turn, then)

    def linger(self, seconds: float) -> None:
        time.sleep(seconds)

    def measure_volume(self, directory: str) -> Volume:
        found = os.statvfs(directory)
        return Volume(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)
