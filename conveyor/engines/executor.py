"""ThreadExecutor: runs blocking work and long computation in threads; and durable names of files
(docs/engines.md, Embedded engine).

All work of the embedded engine that waits for a disk goes through DiskExecutor. The simulator has
virtual time and no threads, so it replaces the executor and runs the work inline.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import outcome
import trio

from conveyor.ports.errors import is_resource_shortage
from conveyor.ports.executor import Executor, T

# The pause between tries while another process holds the write lock. SQLite's own busy handler
# sleeps up to 100 ms between tries, and the lock may be free for most of that time.
_TURN_POLL_S = 0.0003
# At least 9 s in all. Then the error of the last try is reported.
_TURN_POLLS_MAX = 30_000


# Threads for computation. More would take more CPU time from the Trio thread.
COMPUTE_THREADS_MAX = 2


class Volume(msgspec.Struct, frozen=True):
    """The size of a file system, and how much of it is free for this user."""

    free_bytes: int
    total_bytes: int


class DiskExecutor(Executor, Protocol):
    """Laws, besides those of Executor:

    - `run` and `start` do the work once, and deliver its outcome on the Trio thread.
    - `start_when_unlocked` is `start` for work that another process may block by a lock. It
      repeats the work while it raises an error that `is_locked` recognises.
    - `linger` is called by running work. It may wait, so that more callers can join.
    - `measure_volume` returns at once, for the volume of the directory.
    """

    async def run(
        self, work: Callable[..., T], *arguments: Any, limiter: trio.CapacityLimiter | None = None
    ) -> T: ...

    def start(
        self, work: Callable[[], T], then: Callable[[outcome.Outcome[T]], object]
    ) -> None: ...

    def start_when_unlocked(
        self,
        work: Callable[[], T],
        then: Callable[[outcome.Outcome[T]], object],
        is_locked: Callable[[BaseException], bool],
    ) -> None: ...

    def linger(self, seconds: float) -> None: ...

    def measure_volume(self, directory: str) -> Volume: ...


class ThreadExecutor:
    """The executor of a real process. `threads_max` bounds the threads of `run`."""

    def __init__(self, threads_max: int | None = None) -> None:
        self._limiter = None if threads_max is None else trio.CapacityLimiter(threads_max)

    async def run(
        self, work: Callable[..., T], *arguments: Any, limiter: trio.CapacityLimiter | None = None
    ) -> T:
        # An exception that passes through Trio's threads becomes part of a reference cycle: the
        # frames of its traceback refer to it. The callers of `run`, with the bodies that they hold,
        # would stay in memory until the next collection of cycles. So it passes through a list.
        results: list[outcome.Outcome[T]] = []

        def capture() -> None:
            results.append(outcome.capture(work, *arguments))

        try:
            await trio.to_thread.run_sync(capture, limiter=limiter or self._limiter)
        except RuntimeError as error:
            if not is_resource_shortage(error):
                raise
            # No thread is left: the work runs here, as in `start`.
            capture()
        return results.pop().unwrap()

    def start(self, work: Callable[[], T], then: Callable[[outcome.Outcome[T]], object]) -> None:
        token = trio.lowlevel.current_trio_token()

        def deliver(result: outcome.Outcome[T]) -> None:
            token.run_sync_soon(then, result)

        try:
            trio.lowlevel.start_thread_soon(work, deliver)
        except RuntimeError as error:
            if not is_resource_shortage(error):
                raise
            # The system has no thread left. The callers would wait forever, so the work runs here.
            # It blocks all other tasks for as long as the disk takes.
            deliver(outcome.capture(work))

    def start_when_unlocked(
        self,
        work: Callable[[], T],
        then: Callable[[outcome.Outcome[T]], object],
        is_locked: Callable[[BaseException], bool],
    ) -> None:
        def wait_for_turn() -> T:
            result: outcome.Outcome[T] = outcome.capture(work)
            for _ in range(_TURN_POLLS_MAX):
                if not (isinstance(result, outcome.Error) and is_locked(result.error)):
                    break
                time.sleep(_TURN_POLL_S)
                result = outcome.capture(work)
            return result.unwrap()

        self.start(wait_for_turn, then)

    def linger(self, seconds: float) -> None:
        time.sleep(seconds)

    def measure_volume(self, directory: str) -> Volume:
        volume = os.statvfs(directory)
        return Volume(volume.f_bavail * volume.f_frsize, volume.f_blocks * volume.f_frsize)


def sync_directory(directory: str) -> None:
    """Syncs a directory. A sync of the file alone does not make its name durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
