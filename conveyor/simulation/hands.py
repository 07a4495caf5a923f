"""The hands of the embedded engine where there are no threads: work is done on the spot, later."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

import outcome
import trio

from conveyor.engines.embedded.errors import is_busy
from conveyor.simulation.faults import Fault, Faults

T = TypeVar("T")

_TURN_S = 0.001


@dataclass(frozen=True, slots=True)
class VirtualHands:
    """Each piece of work takes a moment of virtual time; some of it fails as disks do."""

    faults: Faults
    random: Random

    async def do(
        self, work: Callable[..., T], *arguments: Any, limiter: trio.CapacityLimiter | None = None
    ) -> T:
        await trio.sleep(self._moment_s())
        return work(*arguments)

    def start(self, work: Callable[[], T], then: Callable[[outcome.Outcome[T]], object]) -> None:
        trio.lowlevel.spawn_system_task(self._later, work, then)

    def start_in_turn(
        self, work: Callable[[], T], then: Callable[[outcome.Outcome[T]], object]
    ) -> None:
        trio.lowlevel.spawn_system_task(self._in_turn, work, then)

    def linger(self, seconds: float) -> None:
        """Waiting here would stop the world; the moment before the work stands for it."""

    async def _later(
        self, work: Callable[[], T], then: Callable[[outcome.Outcome[T]], object]
    ) -> None:
        await trio.sleep(self._moment_s())
        then(self._failure(work) or outcome.capture(work))

    async def _in_turn(
        self, work: Callable[[], T], then: Callable[[outcome.Outcome[T]], object]
    ) -> None:
        result = outcome.capture(work)
        while isinstance(result, outcome.Error) and is_busy(result.error):
            await trio.sleep(_TURN_S)
            result = outcome.capture(work)
        then(result)

    def _failure(self, work: Callable[[], Any]) -> outcome.Error | None:
        """Only a commit may fail as a whole: what writes files tells of each by itself."""
        if getattr(work, "__name__", "") != "_commit":
            return None
        if self.faults.strikes(Fault.COMMIT_FAILED):
            return outcome.Error(_sqlite_error("disk I/O error", sqlite3.SQLITE_IOERR))
        if self.faults.strikes(Fault.DISK_FULL):
            return outcome.Error(_sqlite_error("database or disk is full", sqlite3.SQLITE_FULL))
        return None

    def _moment_s(self) -> float:
        return self.random.uniform(0.0, 0.01)


def _sqlite_error(text: str, code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError(text)
    error.sqlite_errorcode = code
    return error
