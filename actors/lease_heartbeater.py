"""LeaseHeartbeater: one beat keeps lease, message and claim of running work alive (SPEC 6.7).

Owns:    which work is under way here, and what each piece of it holds.
Hears:   Hold, Release.
Says:    nothing. Work that has lost any of the three is cancelled, which cannot block the beat.
Crashes: only by bug. A restart forgets all work, so actors/tree.py starts the runs after it,
         under REST_FOR_ONE: work never outlives its heartbeat.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import trio

from actors.messages import HeartbeaterMessage, Hold, Release
from actors.runtime import Inbox, receive_batch
from conveyor.domain import limits, settlement
from conveyor.domain.changes import Applied
from conveyor.domain.ids import LeaseId
from conveyor.ports.errors import Unavailable
from conveyor.usecases.env import Env

log = logging.getLogger(__name__)

_MAIL_MAX = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseHeartbeater:
    env: Env
    interval_s: float = limits.BEAT_S

    def __post_init__(self) -> None:
        # One beat may be missed: the next still lands before anything ages out.
        assert self.interval_s * 2 < limits.LEASE_TTL_S
        assert limits.LEASE_TTL_S < limits.VISIBILITY_S < limits.CLAIM_TTL_S

    async def run(self, inbox: Inbox[HeartbeaterMessage]) -> None:
        held: dict[LeaseId, Hold] = {}
        async with inbox, trio.open_nursery() as nursery:
            nursery.start_soon(self._beat_forever, held)
            while True:
                for message in await receive_batch(inbox, _MAIL_MAX):
                    match message:
                        case Hold(lease_id):
                            held[lease_id] = message
                        case Release(lease_id):
                            held.pop(lease_id, None)
                        case _:
                            assert_never(message)

    async def _beat_forever(self, held: dict[LeaseId, Hold]) -> None:
        while True:
            await trio.sleep(self.interval_s)
            if not held:
                continue
            try:
                lost = await self._beat(tuple(held.values()))
            except Unavailable as error:
                log.warning("beat missed", extra={"held": len(held), "cause": str(error)})
                continue
            for hold in lost:
                # A Release, and another Hold of the same lease, may have landed meanwhile.
                if held.get(hold.lease_id) is hold:
                    del held[hold.lease_id]
                    hold.work.cancel(reason="its lease, message or claim was lost")

    async def _beat(self, holds: Sequence[Hold]) -> list[Hold]:
        """Renews everything; answers the work that has lost something."""
        leases = await self.env.coordinator.renew(
            [hold.lease_id for hold in holds], ttl_s=limits.LEASE_TTL_S
        )
        receipts = await self.env.queue.extend(
            [hold.message for hold in holds], visibility_s=limits.VISIBILITY_S
        )
        now = self.env.now()
        verdicts = await self.env.store.commit(
            [settlement.extend_claim(hold.message.ref, hold.claim, now=now) for hold in holds]
        )
        return [
            hold
            for hold, verdict in zip(holds, verdicts, strict=True)
            if hold.lease_id in leases
            or hold.message.receipt in receipts
            or not isinstance(verdict, Applied)
        ]
