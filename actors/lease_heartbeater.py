"""LeaseHeartbeater: renews the lease, the message and the claim of running work (SPEC.md 4.6).

Owns:    the set of work in progress in this process, and what each piece of work holds.
Hears:   Hold, Release.
Says:    nothing. It cancels the scope of work that has lost one of the three; a cancel cannot block
         the heartbeat, a message could.
Crashes: only by bug. A restart forgets all work. Therefore actors/tree.py starts the pollers after
         the heartbeater, under REST_FOR_ONE, so that no work continues without a heartbeat.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

import trio

from actors.messages import HeartbeaterMessage, Hold, Release
from actors.runtime import Inbox, Reply, receive_batch
from conveyor.domain import limits
from conveyor.domain.changes import Applied
from conveyor.domain.ids import LeaseId
from conveyor.domain.run import settlement
from conveyor.ports.errors import Unavailable
from conveyor.telemetry import Metrics
from conveyor.usecases.context import Context

log = logging.getLogger(__name__)

# Messages per batch. The replies to Release are sent once per batch, so a larger batch delays them.
_MAIL_MAX = 1_000


@dataclass(slots=True)
class _Held:
    """One piece of work, and when its message and its claim were last renewed for their full
    lifetimes."""

    hold: Hold
    renewed_at: float

    @property
    def leases(self) -> list[LeaseId]:
        leases = (self.hold.lease_id, self.hold.host_lease_id)
        return [lease_id for lease_id in leases if lease_id is not None]


@dataclass(slots=True)
class _Lost:
    """What a heartbeat could not renew: leases, and the receipts of messages that were delivered
    elsewhere or whose claims were taken over."""

    leases: frozenset[LeaseId] = frozenset()
    receipts: frozenset[str] = frozenset()


@dataclass(slots=True)
class _HeldWork:
    """The held work, and the replies to Release that wait for the end of the current heartbeat.

    Without that wait, a heartbeat in progress could hide a message for VISIBILITY_S after its task
    runner has bounced it.
    """

    by_receipt: dict[str, _Held] = field(default_factory=dict)
    is_beating: bool = False
    waiting: list[Reply[None]] = field(default_factory=list)

    def hold(self, hold: Hold) -> None:
        receipt = hold.message.receipt
        before = self.by_receipt.get(receipt)
        # A second Hold for the same message only drops leases. It renews nothing, so the age must
        # stay.
        renewed_at = trio.current_time() if before is None else before.renewed_at
        self.by_receipt[receipt] = _Held(hold, renewed_at)

    def answer_later(self, reply: Reply[None] | None) -> None:
        if reply is not None:
            self.waiting.append(reply)

    def answer_between_beats(self) -> None:
        if not self.is_beating:
            for reply in self.waiting:
                reply.send(None)
            self.waiting.clear()

    def receipts_to_cancel(self, lost: _Lost) -> list[str]:
        """Returns the work that needs what was lost. Work that was released during the heartbeat
        has ended, and work that has passed its leases on needs them no more."""
        return [
            receipt
            for receipt, work in self.by_receipt.items()
            if receipt in lost.receipts or not lost.leases.isdisjoint(work.leases)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseHeartbeater:
    env: Context
    metrics: Metrics | None = None
    interval_s: float = limits.HEARTBEAT_S

    def __post_init__(self) -> None:
        # One heartbeat may be missed: the next one still arrives before a lease ages out.
        assert self.interval_s * 2 < limits.LEASE_TTL_S
        # In this order after a kill: the lease frees its place, then the message returns, then the
        # claim lapses (the comment in conveyor/domain/limits.py has the sum).
        assert limits.LEASE_TTL_S < limits.VISIBILITY_S < limits.CLAIM_TTL_S

    @property
    def due_s(self) -> float:
        """The age at which a heartbeat renews a message and a claim. Most fetches end before it and
        cost no renewal. The renewal comes up to one interval later, and one more if a heartbeat is
        missed: with 10 s between heartbeats that is 20 s, 30 s or 40 s of the 45 s for which a
        message stays hidden."""
        return settlement.renewal_due_s(heartbeat_s=self.interval_s)

    async def run(self, inbox: Inbox[HeartbeaterMessage]) -> None:
        held = _HeldWork()
        if self.metrics is not None:
            self.metrics.slots.leases.set_function(lambda: len(held.by_receipt))
        async with inbox, trio.open_nursery() as nursery:
            nursery.start_soon(self._beat_forever, held)
            while True:
                for message in await receive_batch(inbox, _MAIL_MAX):
                    match message:
                        case Hold():
                            held.hold(message)
                        case Release(receipt, reply):
                            held.by_receipt.pop(receipt, None)
                            held.answer_later(reply)
                        case _:
                            assert_never(message)
                # After the whole batch: a Release of this batch is already removed from `held`, so
                # the next heartbeat does not include it.
                held.answer_between_beats()

    async def _beat_forever(self, held: _HeldWork) -> None:
        while True:
            await trio.sleep(self.interval_s)
            if not held.by_receipt:
                continue
            held.is_beating = True
            try:
                # A copy, because Hold and Release change the dict while the heartbeat awaits.
                lost = await self._beat(tuple(held.by_receipt.values()))
            except Unavailable as error:
                log.warning(
                    "heartbeat failed", extra={"held": len(held.by_receipt), "cause": str(error)}
                )
                # Unknown is not lost. If the outage lasts, a later heartbeat reports what has aged
                # out.
                lost = _Lost()
            # A task runner sends a Hold without leases before it releases a lease. After this
            # checkpoint `run` has read each Hold that was sent before the renewal was answered, so
            # a lease that is missing now is missing to work that still needs it.
            await trio.lowlevel.checkpoint()
            held.is_beating = False
            held.answer_between_beats()
            for receipt in held.receipts_to_cancel(lost):
                held.by_receipt.pop(receipt).hold.scope.cancel(
                    reason="its lease, message or claim was lost"
                )
                if self.metrics is not None:
                    self.metrics.slots.leases_lost.inc()

    async def _beat(self, held: Sequence[_Held]) -> _Lost:
        """Renews all leases, and the messages and claims that are due."""
        lost = _Lost(leases=await self._renew_leases(held))
        now = trio.current_time()
        due = [work for work in held if now - work.renewed_at >= self.due_s]
        if due:
            lost.receipts = await self._renew_rest(due)
            # Only after success: if a renewal raised Unavailable, these items stay due for the next
            # heartbeat.
            for work in due:
                work.renewed_at = now
        return lost

    async def _renew_leases(self, held: Sequence[_Held]) -> frozenset[LeaseId]:
        leases = [lease_id for work in held for lease_id in work.leases]
        if not leases:
            return frozenset()
        return await self.env.coordinator.renew(leases, ttl_s=limits.LEASE_TTL_S)

    async def _renew_rest(self, held: Sequence[_Held]) -> frozenset[str]:
        holds = [work.hold for work in held]
        receipts = await self.env.queue.extend(
            [hold.message for hold in holds], visibility_s=limits.VISIBILITY_S
        )
        # The end of a claim is an instant of the wall clock; the ages above use Trio's clock.
        now = self.env.now()
        verdicts = await self.env.store.commit(
            [settlement.extend_claim(hold.message.ref, hold.task, now=now) for hold in holds]
        )
        return receipts | {
            hold.message.receipt
            for hold, verdict in zip(holds, verdicts, strict=True)
            if not isinstance(verdict, Applied)
        }
