"""CrossProcessSignals: signals between processes that share only an engine (SPEC.md 4.13).

Other processes cannot answer. Leases are the only state about running work that all of them share,
so a teardown waits until no lease of the run is left.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
import trio

from conveyor.domain.ids import JobId, RunId
from conveyor.ports.coordinator import Coordinator, Signals, TeardownResult
from conveyor.ports.errors import Unavailable

# Interval of lease counts during a teardown. A caller waits for the response; each count is a call
# to the coordinator.
POLL_S = 0.02

Tell = Callable[[JobId, RunId, int], Awaitable[None]]
Notify = Callable[[JobId, RunId], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossProcessSignals:
    """`local` are the signals of the worker in this process, if it has one; it is notified
    directly.

    `tell` reaches the workers of all other processes, `notify` one of them. `can_abandon` is True
    if a remote gateway makes the calls, because it continues them after the connection is closed.
    """

    coordinator: Coordinator
    local: Signals | None
    tell: Tell
    notify: Notify
    can_abandon: bool

    async def run_changed(self, job_id: JobId, run_id: RunId, tasks: int = 0) -> None:
        # The local worker first: it needs no network.
        if self.local is not None:
            await self.local.run_changed(job_id, run_id, tasks)
        await self.tell(job_id, run_id, tasks)

    async def batch_opened(self, job_id: JobId, run_id: RunId) -> None:
        """Notifies one worker, which is enough: the one in this process, if there is one."""
        await (self.notify if self.local is None else self.local.batch_opened)(job_id, run_id)

    async def teardown(self, job_id: JobId, run_id: RunId, *, deadline_s: float) -> TeardownResult:
        """Ends the work in all processes and waits until their leases are released. While the
        leases cannot be counted the receipt is not complete, but the work is ended nevertheless."""
        # Before the teardown, which releases the leases that the receipt reports.
        held = await self._count(run_id)
        receipt = TeardownResult(held or 0, (held or 0) if self.can_abandon else 0, complete=False)
        with trio.move_on_after(deadline_s):
            await self.tell(job_id, run_id, 0)
            if self.local is not None:
                await self.local.teardown(job_id, run_id, deadline_s=deadline_s)
            lease_count = await self._count(run_id)
            while lease_count:
                await trio.sleep(POLL_S)
                lease_count = await self._count(run_id)
            return msgspec.structs.replace(receipt, complete=lease_count == 0)
        return receipt

    async def _count(self, run_id: RunId) -> int | None:
        try:
            return await self.coordinator.count(run_id)
        except Unavailable:
            return None


async def no_notification(job_id: JobId, run_id: RunId, tasks: int) -> None:
    """Used if other processes cannot be reached: they find changes by polling."""
    await trio.lowlevel.checkpoint()
