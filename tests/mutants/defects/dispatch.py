"""Mutants of dispatch: runs that nobody finds, permits that nobody counts (SPEC.md 4.6;
docs/architecture.md, Discovery)."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NoReturn

import trio

from conveyor.domain.ids import JobId, LeaseId, RunId
from conveyor.ports.errors import Unavailable
from conveyor.simulation.profiles import NEVER_S
from conveyor.simulation.swaps import combined, swapping
from tests.mutants.mutant import Mutant


def _what_is_new_alone(_: Any) -> Any:
    async def mutated(self: Any, state: Any) -> NoReturn:
        since = 0.0
        while True:
            started_at = self.env.now()
            with suppress(Unavailable):
                await self._scan(state, since)
                since = started_at
            await trio.sleep(self.delta_s)

    return mutated


def _whatever_others_hold(take: Any) -> Any:
    def mutated(
        self: Any, job_id: JobId, run_id: RunId, *, count_max: int, cap: int, ttl_s: float
    ) -> list[LeaseId]:
        count, room = min(count_max, cap), cap + len(self._leases)
        taken: list[LeaseId] = take(self, job_id, run_id, count_max=count, cap=room, ttl_s=ttl_s)
        return taken

    return mutated


def _as_if_none_were_held(_: Any) -> Any:
    def mutated(connection: Any, pool: str, cap: int, now: float) -> int:
        return cap

    return mutated


def _over_any_slot(_: Any) -> Any:
    async def mutated(self: Any, slot: Any, run_id: str, ttl_s: float) -> bool:
        until = {"N": repr(self._clock.now() + ttl_s)}
        item = {"token": {"S": slot.token}, "run_id": {"S": run_id}, "expires_at": until}
        return bool(await self._write("PutItem", Item=slot.key | item))

    return mutated


MUTANTS = (
    Mutant(
        name="discovery_looks_back_never",
        window=33,
        invariants=(27,),
        what="A run that the index shows late, or whose writer's clock is slow, is not found.",
        apply=swapping("actors.queue_discovery:QueueDiscovery._scan_forever", _what_is_new_alone),
        world={
            "workers_count": 1,
            "offset_s": 30.0,
            "disturb_s": NEVER_S,
            "rates": {"killed_before": 0.0, "killed_after": 0.0, "actor_crashed": 0.0},
        },
    ),
    Mutant(
        name="leases_beyond_the_cap",
        window=43,
        invariants=(29,),
        what="Leases are taken without a look at those that others hold.",
        apply=combined(
            swapping(
                "conveyor.engines.memory.coordinator:MemoryCoordinator._take",
                _whatever_others_hold,
            ),
            swapping("conveyor.engines.sqlite.coordinator:_free_count", _as_if_none_were_held),
            swapping("conveyor.engines.aws.coordinator:DynamoCoordinator._put", _over_any_slot),
        ),
    ),
)
