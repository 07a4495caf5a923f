"""Runs the blocking work of the embedded engine without threads: inline, after a short virtual
delay."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, NoReturn, TypeVar

import outcome
import trio

from conveyor.engines.executor import Volume
from conveyor.simulation.faults.faults import Fault, Faults
from conveyor.simulation.faults.power_cut import SyncLog

T = TypeVar("T")

# How long work that found the database locked waits before it tries again.
_LOCK_RETRY_S = 0.001
# The functions of the engine that write bodies, by name.
_WRITES_BODIES = frozenset({"_write_group", "_store", "write"})


@dataclass(frozen=True, slots=True)
class VirtualExecutor:
    """An executor for virtual time. It injects faults of the disk: failed reads and commits, a full
    disk, and bodies of which only half is written."""

    faults: Faults
    random: Random
    syncs: SyncLog | None = None

    async def run(
        self, work: Callable[..., T], *arguments: Any, limiter: trio.CapacityLimiter | None = None
    ) -> T:
        await trio.sleep(self._delay_s())
        if _name_of(work) == "_read":
            self._fail_to_read()
        with self._disk(work):
            return work(*arguments)

    def start(self, work: Callable[[], T], then: Callable[[outcome.Outcome[T]], object]) -> None:
        trio.lowlevel.spawn_system_task(self._run_later, work, then)

    def start_when_unlocked(
        self,
        work: Callable[[], T],
        then: Callable[[outcome.Outcome[T]], object],
        is_locked: Callable[[BaseException], bool],
    ) -> None:
        trio.lowlevel.spawn_system_task(self._retry_while_locked, work, then, is_locked)

    def linger(self, seconds: float) -> None:
        """Does nothing: blocking here would stop the world. The delay before each piece of work
        stands for it."""

    def measure_volume(self, directory: str) -> Volume:
        """Reports unlimited free space, so that the real disk of the machine has no influence."""
        return Volume(free_bytes=1 << 62, total_bytes=0)

    async def _run_later(
        self, work: Callable[[], T], then: Callable[[outcome.Outcome[T]], object]
    ) -> None:
        await trio.sleep(self._delay_s())
        result: outcome.Outcome[T] | None = self._failure(work)
        if result is None:
            with self._disk(work):
                result = outcome.capture(work)
        then(result)

    async def _retry_while_locked(
        self,
        work: Callable[[], T],
        then: Callable[[outcome.Outcome[T]], object],
        is_locked: Callable[[BaseException], bool],
    ) -> None:
        result = outcome.capture(work)
        while isinstance(result, outcome.Error) and is_locked(result.error):
            await trio.sleep(_LOCK_RETRY_S)
            result = outcome.capture(work)
        then(result)

    def _failure(self, work: Callable[[], Any]) -> outcome.Error | None:
        """The injected failure of a commit, or None. Only commits fail as a whole here; work that
        writes files reports each failure by itself."""
        if _name_of(work) != "_commit":
            return None
        if self.faults.occurs(Fault.COMMIT_FAILED):
            return outcome.Error(_sqlite_error("disk I/O error", sqlite3.SQLITE_IOERR))
        if self.faults.occurs(Fault.DISK_FULL):
            return outcome.Error(_sqlite_error("database or disk is full", sqlite3.SQLITE_FULL))
        return None

    def _fail_to_read(self) -> None:
        if self.faults.occurs(Fault.READ_FAILED):
            raise _sqlite_error("disk I/O error", sqlite3.SQLITE_IOERR)
        if self.faults.occurs(Fault.READ_BUSY):
            raise _sqlite_error("database is locked", sqlite3.SQLITE_BUSY)

    def _disk(self, work: Callable[..., Any]) -> AbstractContextManager[None]:
        """The state of the disk while this work runs: it may be full after half of a body, or its
        syncs may be recorded."""
        if _name_of(work) in _WRITES_BODIES and self.faults.occurs(Fault.BODY_TORN):
            return _full_disk()
        return nullcontext() if self.syncs is None else self.syncs.recording()

    def _delay_s(self) -> float:
        return self.random.uniform(0.0, 0.01)


def _name_of(work: Callable[..., Any]) -> str:
    return getattr(work.func if isinstance(work, partial) else work, "__name__", "")


@contextmanager
def _full_disk() -> Iterator[None]:
    """Makes writes fail after half of their data. Other work is not affected, because this work
    runs inline."""
    write, writev = os.write, os.writev

    def torn(descriptor: int, data: bytes) -> NoReturn:
        write(descriptor, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    system: Any = os
    system.write, system.writev = torn, lambda at, parts: torn(at, b"".join(parts))
    try:
        yield
    finally:
        system.write, system.writev = write, writev


def _sqlite_error(text: str, code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError(text)
    error.sqlite_errorcode = code
    return error
