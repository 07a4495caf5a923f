"""What a poller has on its desk: its run, its leases, and the tasks in hand (SPEC.md 4.6)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import trio

from actors.limiters.fair_limiter import FairLimiter, Preemptible
from actors.poller.budget import BudgetReservations, CallReservation
from actors.poller.host_limiter import AdmittedMessage, HostLimiter
from conveyor.domain import limits
from conveyor.domain.backpressure.permits import idle_s
from conveyor.domain.ids import CallerId, LeaseId
from conveyor.domain.model import Run
from conveyor.domain.run.settlement import Claim, backoff_s
from conveyor.domain.run.wait_reason import WaitReason
from conveyor.ports.coordinator import Coordinator
from conveyor.ports.errors import Unavailable
from conveyor.ports.queue import Message
from conveyor.telemetry import Metrics
from conveyor.usecases.context import Context

# A lease that is passed on has one beat to spare: it lives through two from its last start.
REUSE_S_MAX = limits.LEASE_TTL_S - 2 * limits.HEARTBEAT_S - 1.0
EMPTY_RECEIVES_BEFORE_SINGLE = 2
# How long a run that cannot be worked on rests: short enough that work goes on soon after the cause
# has passed, long enough that tasks are not taken and handed back all the time.
DEFER_S, DEFER_S_MAX = 0.5, 30.0


@dataclass(frozen=True, slots=True)
class ClaimedMessage:
    """A message in hand, its task claimed and its call paid for, where those need it."""

    admitted: AdmittedMessage
    claim: Claim
    reservation: CallReservation | None = None
    is_funded: bool = True


@dataclass(slots=True, eq=False)
class PollerState:
    """What the poller's loop shares with the tasks that it started."""

    run: Run
    idle_leases: list[LeaseId] = field(default_factory=list)
    renewed_at: dict[LeaseId, float] = field(default_factory=dict)
    inflight_count: int = 0
    next_redelivery_at: float = math.inf
    refusals: int = 0
    task_s: float = 0.0
    empty_receives: int = 0
    emptied_at: float = -math.inf
    changed: trio.Event = field(default_factory=trio.Event)
    reservations: BudgetReservations | None = None
    host_limiter: HostLimiter | None = None
    wait_reason: WaitReason | None = None
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
        self.changed.set()

    async def wait_changed(self, timeout_s: float) -> None:
        with trio.move_on_after(timeout_s):
            await self.changed.wait()
        self.changed = trio.Event()

    def receive_limit(self, wanted: int) -> int:
        """One, after a queue was empty twice: most of the time it still is, and where rows stand
        for leases each that is taken for nothing costs two writes."""
        return min(1, wanted) if self.refusals >= EMPTY_RECEIVES_BEFORE_SINGLE else wanted

    def pop_idle_leases(self, count: int) -> list[LeaseId]:
        taken, self.idle_leases = self.idle_leases[:count], self.idle_leases[count:]
        return taken

    async def renew_idle_leases(self, coordinator: Coordinator) -> None:
        """Once a spare lease is too old to be passed on, it gets a new life, with all that are as
        old, in one call: the beat keeps only those in use alive."""
        now = trio.current_time()
        old = [lease_id for lease_id, at in self.renewed_at.items() if at < now - REUSE_S_MAX]
        if set(old).isdisjoint(self.idle_leases):
            return
        lost = await coordinator.renew(old, ttl_s=limits.LEASE_TTL_S)
        self.renewed_at.update({lease_id: now for lease_id in old if lease_id not in lost})
        # What still works under a lost one hears of it from the beat.
        for lease_id in lost.intersection(self.idle_leases):
            self.idle_leases.remove(lease_id)
            del self.renewed_at[lease_id]

    def pop_refused(self) -> bool:
        """Whether messages went back for want of leases, since this was last asked."""
        is_refused, self.is_refused = self.is_refused, False
        return is_refused


@dataclass(slots=True, eq=False)
class TaskPermit:
    """The slot and the lease of one task, which the next one may have before it is all over."""

    state: PollerState
    limiter: FairLimiter
    caller: CallerId
    lease_id: LeaseId
    is_writing: bool = False
    fetch: Preemptible | None = None

    def allow_preemption(self, scope: trio.CancelScope, *, receives: int) -> None:
        self.fetch = self.limiter.allow_preemption(
            self.caller,
            lambda: scope.cancel(reason="a caller with fewer slots waits"),
            receives=receives,
        )

    def release_early(self) -> bool:
        """The page is there: from here on nothing interrupts the task."""
        self._forbid_preemption()
        self.is_writing = self.limiter.begin_write(self.caller, self.state.run.run_id)
        if self.is_writing:
            self._pass_on_lease()
        return self.is_writing

    def release(self) -> None:
        self._forbid_preemption()
        if self.is_writing:
            self.limiter.end_write()
        else:
            self.limiter.release(self.caller, self.state.run.run_id, 1)
            self._pass_on_lease()

    def _forbid_preemption(self) -> None:
        if self.fetch is not None:
            self.limiter.forbid_preemption(self.fetch)

    def _pass_on_lease(self) -> None:
        self.state.inflight_count -= 1
        self.state.idle_leases.append(self.lease_id)
        self.state.changed.set()


# What a poller takes from its queue, and what it puts back for want of leases (SPEC.md 4.6).


async def receive(
    env: Context, metrics: Metrics, state: PollerState, count_max: int
) -> list[Message]:
    """Up to `count_max` messages; where parked ones keep the poller going, an empty queue is not
    looked at in every round."""
    now = trio.current_time()
    is_early = state.host_limiter is not None and now < state.emptied_at + idle_s(
        state.empty_receives
    )
    if count_max == 0 or is_early:
        return []
    messages = await env.queue.receive(
        state.run.run_id, count_max=count_max, visibility_s=limits.VISIBILITY_S
    )
    metrics.receives.inc()
    metrics.messages_delivered.inc(len(messages))
    if messages:
        state.empty_receives, state.emptied_at = 0, -math.inf
    else:
        state.empty_receives, state.emptied_at = state.empty_receives + 1, now
    return messages


async def bounce_unpermitted(
    env: Context, metrics: Metrics, state: PollerState, messages: Sequence[Message]
) -> None:
    """Where permits come after the receive: what got none goes back."""
    state.is_refused = bool(messages)
    metrics.messages_bounced.inc(len(messages))
    lines = env.policy.backpressure
    delays = {each.receipt: lines.bounce_delay_s(each.receives) for each in messages}
    for delay_s in sorted(set(delays.values())):
        group = [each for each in messages if delays[each.receipt] == delay_s]
        with suppress(Unavailable):  # They come back by themselves.
            await env.queue.bounce(group, delay_s=delay_s)
