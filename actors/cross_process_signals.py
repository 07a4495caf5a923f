"""CrossProcessSignals: signals between processes that share an engine, and nothing else
(SPEC.md 4.13)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
import trio

from conveyor.domain.ids import JobId, RunId
from conveyor.ports.coordinator import Coordinator
from conveyor.ports.errors import Unavailable
from conveyor.ports.worker_signals import Signals, TeardownResult

POLL_S = 0.02

Tell = Callable[[JobId, RunId], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossProcessSignals:
    """`local` are the signals of the worker in this process, if it has one: it hears at once.

    `tell` reaches the workers of all other processes, `ring` some one of all. `can_abandon` where a
    gateway elsewhere makes the calls, which goes on when we hang up.
    """

    coordinator: Coordinator
    local: Signals | None
    tell: Tell
    notify: Tell
    can_abandon: bool

    async def run_changed(self, job_id: JobId, run_id: RunId) -> None:
        if self.local is not None:
            await self.local.run_changed(job_id, run_id)
        await self.tell(job_id, run_id)

    async def batch_opened(self, job_id: JobId, run_id: RunId) -> None:
        """One worker is enough, and the one in this process the nearest."""
        await (self.notify if self.local is None else self.local.batch_opened)(job_id, run_id)

    async def teardown(self, job_id: JobId, run_id: RunId, *, deadline_s: float) -> TeardownResult:
        """Others cannot answer: the leases are all that we share with them. While these cannot be
        counted the receipt is not complete, but work is ended all the same."""
        held = await self._count(run_id)
        receipt = TeardownResult(held or 0, (held or 0) if self.can_abandon else 0, complete=False)
        with trio.move_on_after(deadline_s):
            await self.tell(job_id, run_id)
            if self.local is not None:
                await self.local.teardown(job_id, run_id, deadline_s=deadline_s)
            left = await self._count(run_id)
            while left:
                await trio.sleep(POLL_S)
                left = await self._count(run_id)
            return msgspec.structs.replace(receipt, complete=left == 0)
        return receipt

    async def _count(self, run_id: RunId) -> int | None:
        try:
            return await self.coordinator.count(run_id)
        except Unavailable:
            return None


async def no_notification(job_id: JobId, run_id: RunId) -> None:
    """Where there is no way to reach them, other processes find out by looking."""
    await trio.lowlevel.checkpoint()
