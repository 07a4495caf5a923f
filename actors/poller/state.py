"""PollerState: what the poll loop shares with the tasks that it started (SPEC.md 4.6)."""

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

# An idle lease may be reused while it still survives two heartbeats: the first heartbeat of its new
# task may be missed.
REUSE_S_MAX = limits.LEASE_TTL_S - 2 * limits.HEARTBEAT_S - 1.0
EMPTY_RECEIVES_BEFORE_SINGLE = 2
# How long a run pauses after a cause that concerns all its tasks. Shorter pauses would claim and
# release tasks all the time; longer ones delay the restart after the cause has passed.
DEFER_S, DEFER_S_MAX = 0.5, 30.0


@dataclass(frozen=True, slots=True)
class ClaimedMessage:
    """A received message with the result of its claim and, where the run has a budget, the
    reservation for its call."""

    admitted: AdmittedMessage
    claim: Claim
    reservation: CallReservation | None = None
    is_funded: bool = True


@dataclass(slots=True, eq=False)
class PollerState:
    """Mutable state of one poller. Only the poll loop and the tasks it started write it."""

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
        """Pauses the run for `delay_s`; without it, for a delay that doubles until a task ends.
        Tasks that were in progress together count as one deferral."""
        now = trio.current_time()
        if now >= self.deferred_until:
            self.deferrals += 1
        if delay_s is None:
            delay_s = backoff_s(self.deferrals - 1, first_s=DEFER_S, delay_s_max=DEFER_S_MAX)
        self.deferred_until = max(self.deferred_until, now + min(delay_s, DEFER_S_MAX))
        self.deferred_for, self.deferred_detail = reason, detail
        self.changed.set()

    async def wait_changed(self, timeout_s: float) -> None:
        # A deadline may pass while the caller releases leases, and Trio refuses negative times.
        with trio.move_on_after(max(timeout_s, 0.0)):
            await self.changed.wait()
        self.changed = trio.Event()

    def receive_limit(self, wanted: int) -> int:
        """Returns how many messages to ask for: one after two empty receives, because the queue is
        probably still empty. With DynamoDB leases, every unused lease costs two writes."""
        return min(1, wanted) if self.refusals >= EMPTY_RECEIVES_BEFORE_SINGLE else wanted

    def pop_idle_leases(self, count: int) -> list[LeaseId]:
        taken, self.idle_leases = self.idle_leases[:count], self.idle_leases[count:]
        return taken

    async def renew_idle_leases(self, coordinator: Coordinator) -> None:
        """Renews the leases that are too old to be reused, in one call. The heartbeater renews only
        the leases of running tasks."""
        now = trio.current_time()
        old = [lease_id for lease_id, at in self.renewed_at.items() if at < now - REUSE_S_MAX]
        if set(old).isdisjoint(self.idle_leases):
            return
        lost = await coordinator.renew(old, ttl_s=limits.LEASE_TTL_S)
        self.renewed_at.update({lease_id: now for lease_id in old if lease_id not in lost})
        # The heartbeater cancels tasks that still run under a lost lease.
        for lease_id in lost.intersection(self.idle_leases):
            self.idle_leases.remove(lease_id)
            del self.renewed_at[lease_id]

    def pop_refused(self) -> bool:
        """Returns whether messages were returned for lack of leases since the last call."""
        is_refused, self.is_refused = self.is_refused, False
        return is_refused


@dataclass(slots=True, eq=False)
class TaskPermit:
    """The slot and the lease of one task. The task may pass them on before it has ended."""

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
        """Passes slot and lease on to the next task: the page has arrived and only has to be
        written. Returns False if too many tasks are writing already. Ends preemption."""
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


# Receiving from the queue of the run, and returning what has no lease (SPEC.md 4.6).


async def receive(
    env: Context, metrics: Metrics, state: PollerState, count_max: int
) -> list[Message]:
    """Receives up to `count_max` messages. While held messages keep the poller busy, an empty
    queue is not polled every time."""
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
    """Returns messages without a lease to the queue. Only used when a benchmark switches permits
    before receiving off."""
    state.is_refused = bool(messages)
    metrics.messages_bounced.inc(len(messages))
    lines = env.policy.backpressure
    delays = {each.receipt: lines.bounce_delay_s(each.receives) for each in messages}
    for delay_s in sorted(set(delays.values())):
        group = [each for each in messages if delays[each.receipt] == delay_s]
        with suppress(Unavailable):  # They become visible again by themselves.
            await env.queue.bounce(group, delay_s=delay_s)
