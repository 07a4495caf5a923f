"""LeaseHeartbeater: one beat keeps lease, message and claim of running work alive (SPEC.md 4.6).

Owns:    which work is under way here, and what each piece of it holds.
Hears:   Hold, Release.
Says:    nothing. Work that has lost any of the three is cancelled, which cannot block the beat.
Crashes: only by bug. A restart forgets all work, so actors/tree.py starts the runs after it,
         under REST_FOR_ONE: work never outlives its heartbeat.
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
from conveyor.domain.run import settlement
from conveyor.ports.errors import Unavailable
from conveyor.usecases.context import Context

log = logging.getLogger(__name__)

_MAIL_MAX = 1_000
# The visibility that a message still has when one beat was missed: enough for a slow call.
_SPARE_S = 5.0


@dataclass(slots=True)
class _Held:
    """A piece of work, and when its message and its claim were last given their whole lives."""

    hold: Hold
    renewed_at: float


@dataclass(slots=True)
class _HeldWork:
    """What is held, and who waits to hear that a beat in progress has let go of their work.

    Without that wait, a beat could hide a message for a minute that its worker just put back.
    """

    held: dict[str, _Held] = field(default_factory=dict)
    is_beating: bool = False
    waiting: list[Reply[None]] = field(default_factory=list)

    def hold(self, hold: Hold) -> None:
        receipt = hold.message.receipt
        before = self.held.get(receipt)
        renewed_at = trio.current_time() if before is None else before.renewed_at
        self.held[receipt] = _Held(hold, renewed_at)

    def answer_later(self, reply: Reply[None] | None) -> None:
        if reply is not None:
            self.waiting.append(reply)

    def answer_between_beats(self) -> None:
        if not self.is_beating:
            for reply in self.waiting:
                reply.send(None)
            self.waiting.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseHeartbeater:
    env: Context
    interval_s: float = limits.HEARTBEAT_S

    def __post_init__(self) -> None:
        # One beat may be missed: the next still lands before anything ages out.
        assert self.interval_s * 2 < limits.LEASE_TTL_S
        assert limits.LEASE_TTL_S < limits.VISIBILITY_S < limits.CLAIM_TTL_S

    @property
    def due_s(self) -> float:
        """How old a message and a claim are when a beat renews them: most fetches end before. The
        beat comes up to one interval later, and one more if it is missed: with beats of 10 s that
        is 20 s, 30 s or 40 s of the 45 s that a message stays hidden."""
        return min(limits.VISIBILITY_S / 2, limits.VISIBILITY_S - 2 * self.interval_s - _SPARE_S)

    async def run(self, inbox: Inbox[HeartbeaterMessage]) -> None:
        held = _HeldWork()
        async with inbox, trio.open_nursery() as nursery:
            nursery.start_soon(self._beat_forever, held)
            while True:
                for message in await receive_batch(inbox, _MAIL_MAX):
                    match message:
                        case Hold():
                            held.hold(message)
                        case Release(receipt, reply):
                            held.held.pop(receipt, None)
                            held.answer_later(reply)
                        case _:
                            assert_never(message)
                held.answer_between_beats()

    async def _beat_forever(self, held: _HeldWork) -> None:
        while True:
            await trio.sleep(self.interval_s)
            if not held.held:
                continue
            held.is_beating = True
            try:
                lost = await self._beat(tuple(held.held.values()))
            except Unavailable as error:
                log.warning("heartbeat failed", extra={"held": len(held.held), "cause": str(error)})
                lost = []
            held.is_beating = False
            held.answer_between_beats()
            for each in lost:
                # A Release may have landed meanwhile.
                if held.held.pop(each.hold.message.receipt, None) is not None:
                    each.hold.work.cancel(reason="its lease, message or claim was lost")

    async def _beat(self, held: Sequence[_Held]) -> list[_Held]:
        """Renews all leases, and messages and claims that are due; answers the work that has lost
        any of the three."""
        lost = await self._renew_leases(held)
        now = trio.current_time()
        due = [each for each in held if now - each.renewed_at >= self.due_s]
        if due:
            lost += await self._renew_rest(due)
            for each in due:
                each.renewed_at = now
        return lost

    async def _renew_leases(self, held: Sequence[_Held]) -> list[_Held]:
        leases = [each.hold.lease_id for each in held if each.hold.lease_id is not None]
        visits = [each.hold.host_lease_id for each in held if each.hold.host_lease_id is not None]
        if not leases and not visits:
            return []
        lost = await self.env.coordinator.renew([*leases, *visits], ttl_s=limits.LEASE_TTL_S)
        return [
            each
            for each in held
            if not lost.isdisjoint((each.hold.lease_id, each.hold.host_lease_id))
        ]

    async def _renew_rest(self, held: Sequence[_Held]) -> list[_Held]:
        holds = [each.hold for each in held]
        receipts = await self.env.queue.extend(
            [hold.message for hold in holds], visibility_s=limits.VISIBILITY_S
        )
        now = self.env.now()
        verdicts = await self.env.store.commit(
            [settlement.extend_claim(hold.message.ref, hold.claim, now=now) for hold in holds]
        )
        return [
            each
            for each, verdict in zip(held, verdicts, strict=True)
            if each.hold.message.receipt in receipts or not isinstance(verdict, Applied)
        ]
