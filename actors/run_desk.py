"""What a poller has on its desk: its run, its leases, and the tasks in hand (SPEC.md 4.6)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import trio

from actors.doorkeeper import Doorkeeper, Visit
from actors.gate import FairGate, Preemptible
from actors.purse import Purse, Toll
from conveyor.domain import limits
from conveyor.domain.ids import CallerId, LeaseId
from conveyor.domain.model import Run
from conveyor.domain.retry import backoff_s
from conveyor.domain.settlement import Claim
from conveyor.domain.waiting import WaitReason
from conveyor.ports.coordinator import Coordinator

# A lease that is passed on has one beat to spare: it lives through two from its last start.
REUSE_S_MAX = limits.LEASE_TTL_S - 2 * limits.BEAT_S - 1.0
MISSES_UNTIL_ONE = 2
# How long a run that cannot be worked on rests: short enough that work goes on soon after the cause
# has passed, long enough that tasks are not taken and handed back all the time.
DEFER_S, DEFER_S_MAX = 0.5, 30.0


@dataclass(frozen=True, slots=True)
class Taken:
    """A message in hand, its task claimed and its call paid for, where those need it."""

    visit: Visit
    claim: Claim
    toll: Toll | None = None
    is_paid: bool = True


@dataclass(slots=True, eq=False)
class Desk:
    """What the poller's loop shares with the tasks that it started."""

    run: Run
    spare: list[LeaseId] = field(default_factory=list)
    fresh_at: dict[LeaseId, float] = field(default_factory=dict)
    inflight_count: int = 0
    back_at: float = math.inf
    misses: int = 0
    task_s: float = 0.0
    dry_looks: int = 0
    emptied_at: float = -math.inf
    news: trio.Event = field(default_factory=trio.Event)
    purse: Purse | None = None
    doors: Doorkeeper | None = None
    waits_for: WaitReason | None = None
    is_refused: bool = False
    deferred_until: float = -math.inf
    deferred_for: WaitReason | None = None
    deferred_detail: str | None = None
    deferrals: int = 0

    def defer(self, reason: WaitReason, detail: str, delay_s: float | None) -> None:
        """No task of the run can be tried for a while: as long as `delay_s` says, else longer each
        time until a task ends. Tasks that were under way together count once."""
        now = trio.current_time()
        if now >= self.deferred_until:
            self.deferrals += 1
        if delay_s is None:
            delay_s = backoff_s(self.deferrals - 1, first_s=DEFER_S, delay_s_max=DEFER_S_MAX)
        self.deferred_until = max(self.deferred_until, now + min(delay_s, DEFER_S_MAX))
        self.deferred_for, self.deferred_detail = reason, detail
        self.news.set()

    async def wait_news(self, timeout_s: float) -> None:
        with trio.move_on_after(timeout_s):
            await self.news.wait()
        self.news = trio.Event()

    def ask_for(self, wanted: int) -> int:
        """One, after a queue was empty twice: most of the time it still is, and where rows stand
        for leases each that is taken for nothing costs two writes."""
        return min(1, wanted) if self.misses >= MISSES_UNTIL_ONE else wanted

    def take_spare(self, count: int) -> list[LeaseId]:
        taken, self.spare = self.spare[:count], self.spare[count:]
        return taken

    async def freshen(self, coordinator: Coordinator) -> None:
        """Once a spare lease is too old to be passed on, it gets a new life, with all that are as
        old, in one call: the beat keeps only those in use alive."""
        now = trio.current_time()
        old = [lease_id for lease_id, at in self.fresh_at.items() if at < now - REUSE_S_MAX]
        if set(old).isdisjoint(self.spare):
            return
        lost = await coordinator.renew(old, ttl_s=limits.LEASE_TTL_S)
        self.fresh_at.update({lease_id: now for lease_id in old if lease_id not in lost})
        # What still works under a lost one hears of it from the beat.
        for lease_id in lost.intersection(self.spare):
            self.spare.remove(lease_id)
            del self.fresh_at[lease_id]

    def take_refusal(self) -> bool:
        """Whether messages went back for want of leases, since this was last asked."""
        is_refused, self.is_refused = self.is_refused, False
        return is_refused


@dataclass(slots=True, eq=False)
class Seat:
    """The slot and the lease of one task, which the next one may have before it is all over."""

    desk: Desk
    gate: FairGate
    caller: CallerId
    lease_id: LeaseId
    is_aside: bool = False
    fetch: Preemptible | None = None

    def allow_preemption(self, scope: trio.CancelScope, *, receives: int) -> None:
        self.fetch = self.gate.allow_preemption(
            self.caller,
            lambda: scope.cancel(reason="a caller with fewer slots waits"),
            receives=receives,
        )

    def make_room(self) -> bool:
        """The page is there: from here on nothing interrupts the task."""
        self._forbid_preemption()
        self.is_aside = self.gate.step_aside(self.caller, self.desk.run.run_id)
        if self.is_aside:
            self._pass_on_lease()
        return self.is_aside

    def leave(self) -> None:
        self._forbid_preemption()
        if self.is_aside:
            self.gate.leave()
        else:
            self.gate.give_back(self.caller, self.desk.run.run_id, 1)
            self._pass_on_lease()

    def _forbid_preemption(self) -> None:
        if self.fetch is not None:
            self.gate.forbid_preemption(self.fetch)

    def _pass_on_lease(self) -> None:
        self.desk.inflight_count -= 1
        self.desk.spare.append(self.lease_id)
        self.desk.news.set()
