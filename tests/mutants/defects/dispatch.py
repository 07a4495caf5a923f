"""Mutants of dispatch: runs that nobody finds, permits that nobody counts (SPEC.md 4.6;
docs/architecture.md, Discovery)."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any, NoReturn

import msgspec
import trio

from conveyor.domain.ids import JobId, LeaseId, RunId
from conveyor.domain.ownership import SLOTS_SHARE, LiveWorkers
from conveyor.ports.errors import Unavailable
from conveyor.simulation.profiles import NEVER_S
from conveyor.simulation.swaps import combined, swapping
from conveyor.usecases.run.run_progress import WORKERS
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


def _for_a_day(_: Any) -> Any:
    async def mutated(env: Any, presence: Any) -> None:
        text = msgspec.json.encode(presence).decode()
        await env.coordinator.put_status(env.process_id, {WORKERS: text}, ttl_s=86_400.0)

    return mutated


def _never(_: Any) -> Any:
    async def mutated(env: Any) -> None:
        await trio.lowlevel.checkpoint()

    return mutated


def _by_the_first_reports(_: Any) -> Any:
    def mutated(self: Any, workers: frozenset[str]) -> None:
        if self._live is None:
            self._live = LiveWorkers(workers, math.inf)
            self._updated.set()

    return mutated


def _at_any_age(_: Any) -> Any:
    def mutated(self: LiveWorkers, now: float) -> bool:
        return True

    return mutated


def _rounded_down(_: Any) -> Any:
    def mutated(*, tasks: int, cap: int, slots: int) -> int:
        return min(tasks, cap) // max(1, slots // SLOTS_SHARE)

    return mutated


def _until_it_ends(_: Any) -> Any:
    async def mutated(self: Any, state: Any) -> float:
        if not state.permits.inflight_count:
            await state.permits.release_idle()
        return math.inf

    return mutated


_SEVERAL_WORKERS = {"workers_count": 3, "concurrency": 50}

MUTANTS = (
    Mutant(
        name="dead_workers_own_runs",
        window=51,
        invariants=(27, 20),
        what="The report of a killed worker stays for a day, and nobody takes over its runs.",
        apply=combined(
            swapping("conveyor.usecases.run.run_progress:publish_presence", _for_a_day),
            swapping("conveyor.usecases.run.run_progress:withdraw_presence", _never),
        ),
        world=_SEVERAL_WORKERS,
    ),
    Mutant(
        name="workers_are_read_once",
        window=51,
        invariants=(27, 20),
        what="A worker keeps to the reports that it has read first, however old they are.",
        apply=combined(
            swapping("actors.worker_roster:Roster.update", _by_the_first_reports),
            swapping("conveyor.domain.ownership:LiveWorkers.is_recent", _at_any_age),
        ),
        world=_SEVERAL_WORKERS,
    ),
    Mutant(
        name="short_runs_without_owner",
        window=38,
        invariants=(27, 20),
        what="A run whose tasks fill no share of a worker's slots belongs to nobody.",
        apply=swapping("conveyor.domain.ownership:owners_wanted", _rounded_down),
        world=_SEVERAL_WORKERS,
    ),
    Mutant(
        name="quiet_until_the_end",
        window=38,
        invariants=(27, 20),
        what="A poller that has received every message never looks for one that returns.",
        apply=swapping("actors.poller.poller:RunPoller._stay_quiet", _until_it_ends),
        world=_SEVERAL_WORKERS,
    ),
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
