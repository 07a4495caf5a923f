"""Mutants of dispatch: runs that no worker discovers, leases beyond the cap (SPEC.md 4.6;
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
from conveyor.simulation.swaps import combine, swap
from conveyor.usecases.run.run_progress import WORKERS
from tests.mutants.mutant import Mutant


def _scan_new_runs_only(_: Any) -> Any:
    async def mutated(self: Any, state: Any) -> NoReturn:
        since = 0.0
        while True:
            started_at = self.env.now()
            with suppress(Unavailable):
                await self._scan(state, since)
                since = started_at
            await trio.sleep(self.delta_s)

    return mutated


def _ignore_other_leases(take: Any) -> Any:
    def mutated(
        self: Any, job_id: JobId, run_id: RunId, *, count_max: int, cap: int, ttl_s: float
    ) -> list[LeaseId]:
        count, room = min(count_max, cap), cap + len(self._leases)
        taken: list[LeaseId] = take(self, job_id, run_id, count_max=count, cap=room, ttl_s=ttl_s)
        return taken

    return mutated


def _report_all_free(_: Any) -> Any:
    def mutated(connection: Any, pool: str, cap: int, now: float) -> int:
        return cap

    return mutated


def _overwrite_slot(_: Any) -> Any:
    async def mutated(self: Any, slot: Any, run_id: str, ttl_s: float) -> bool:
        until = {"N": repr(self._clock.now() + ttl_s)}
        item = {"token": {"S": slot.token}, "run_id": {"S": run_id}, "expires_at": until}
        return bool(await self._write("PutItem", Item=slot.key | item))

    return mutated


def _publish_for_a_day(_: Any) -> Any:
    async def mutated(env: Any, presence: Any) -> None:
        text = msgspec.json.encode(presence).decode()
        await env.coordinator.put_status(env.process_id, {WORKERS: text}, ttl_s=86_400.0)

    return mutated


def _do_not_withdraw(_: Any) -> Any:
    async def mutated(env: Any) -> None:
        await trio.lowlevel.checkpoint()

    return mutated


def _keep_first_reports(_: Any) -> Any:
    def mutated(self: Any, workers: frozenset[str]) -> None:
        if self._live is None:
            self._live = LiveWorkers(workers, math.inf)
            self._updated.set()

    return mutated


def _always_recent(_: Any) -> Any:
    def mutated(self: LiveWorkers, now: float) -> bool:
        return True

    return mutated


def _round_down(_: Any) -> Any:
    def mutated(*, tasks: int, cap: int, slots: int) -> int:
        return min(tasks, cap) // max(1, slots // SLOTS_SHARE)

    return mutated


def _stay_quiet_until_end(_: Any) -> Any:
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
        what="The report of a killed worker stays for a day, so no worker takes over its runs.",
        apply=combine(
            swap("conveyor.usecases.run.run_progress:publish_presence", _publish_for_a_day),
            swap("conveyor.usecases.run.run_progress:withdraw_presence", _do_not_withdraw),
        ),
        world=_SEVERAL_WORKERS,
    ),
    Mutant(
        name="workers_are_read_once",
        window=51,
        invariants=(27, 20),
        what="A worker uses the first reports that it read, however old they are.",
        apply=combine(
            swap("actors.worker_roster:Roster.update", _keep_first_reports),
            swap("conveyor.domain.ownership:LiveWorkers.is_recent", _always_recent),
        ),
        world=_SEVERAL_WORKERS,
    ),
    Mutant(
        name="short_runs_without_owner",
        window=38,
        invariants=(27, 20),
        what="A run whose tasks need less than one share of a worker's slots has no owner.",
        apply=swap("conveyor.domain.ownership:owners_wanted", _round_down),
        world=_SEVERAL_WORKERS,
    ),
    Mutant(
        name="quiet_until_the_end",
        window=38,
        invariants=(27, 20),
        what="A poller that has received every message never receives a returned message.",
        apply=swap("actors.poller.poller:RunPoller._stay_quiet", _stay_quiet_until_end),
        world=_SEVERAL_WORKERS,
    ),
    Mutant(
        name="discovery_looks_back_never",
        window=33,
        invariants=(27,),
        what="A run that is late in the index, or whose writer's clock is slow, is not discovered.",
        apply=swap("actors.queue_discovery:QueueDiscovery._scan_forever", _scan_new_runs_only),
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
        what="Leases are granted without counting those that others hold.",
        apply=combine(
            swap(
                "conveyor.engines.memory.coordinator:MemoryCoordinator._take",
                _ignore_other_leases,
            ),
            swap("conveyor.engines.sqlite.coordinator:_free_count", _report_all_free),
            swap("conveyor.engines.aws.coordinator:DynamoCoordinator._put", _overwrite_slot),
        ),
    ),
)
