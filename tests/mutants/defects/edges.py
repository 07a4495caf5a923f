"""Mutants of connections, spend, host limits and syncs before a power cut."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import msgspec

from conveyor.domain.model import Job, Result, Task, TaskRef
from conveyor.domain.run.settlement import Claimed
from conveyor.ports.coordinator import HostPool
from conveyor.ports.gateway import PageMemory, Scraped, ScrapeRequest
from conveyor.simulation.environment.conditions import Conditions
from conveyor.simulation.swaps import swap
from conveyor.usecases.context import Context
from conveyor.usecases.run.tasks import Finish
from tests.mutants.mutant import Mutant

POWER_CUTS = Conditions(power_cut_every_s=15.0)
ORDERLY = Conditions(is_isolated=True)


def _clear_partition(request_for: Any) -> Any:
    def mutated(env: Context, job: Job, claimed: Claimed, *memory: PageMemory) -> ScrapeRequest:
        request: ScrapeRequest = request_for(env, job, claimed, *memory)
        return msgspec.structs.replace(request, partition="")

    return mutated


def _drop_cost(judge_success: Any) -> Any:
    def mutated(env: Context, ref: TaskRef, task: Task, scraped: Scraped, result: Result) -> Finish:
        free = msgspec.structs.replace(scraped, credits=0, cost_micros=0)
        finish: Finish = judge_success(env, ref, task, free, result)
        return finish

    return mutated


def _use_cap_of_job(pool: Any) -> Any:
    def mutated(self: Any, host: str) -> HostPool:
        narrow: HostPool = pool(self, host)
        return msgspec.structs.replace(narrow, cap=self._job.max_inflight, spacing_s=0.0)

    return mutated


def _do_not_sync(_: Any) -> Any:
    def mutated(directory: str) -> None:
        return

    return mutated


def _write_without_sync(write: Any) -> Any:
    def mutated(self: Any, prefix: str, bodies: Sequence[Any]) -> Any:
        system: Any = os
        synced, system.fdatasync = os.fdatasync, lambda _: None
        try:
            return write(self, prefix, bodies)
        finally:
            system.fdatasync = synced

    return mutated


def _close_without_sync(_: Any) -> Any:
    def mutated(put: Any) -> None:
        os.close(put.descriptor)
        put.descriptor = None

    return mutated


MUTANTS = (
    Mutant(
        name="connections_shared_by_callers",
        window=108,
        invariants=(55,),
        what="A connection of one caller is reused for another caller.",
        apply=swap("conveyor.usecases.run.tasks:request_for", _clear_partition),
        world={"conditions": Conditions(hostile="late_answers"), "has_gateway": False},
    ),
    Mutant(
        name="page_not_in_spend",
        window=109,
        invariants=(52,),
        what="A paid page is missing from the spend and the history.",
        apply=swap("conveyor.usecases.run.tasks:judge_success", _drop_cost),
        world={"is_fault_free": True, "conditions": ORDERLY, "has_gateway": True},
    ),
    Mutant(
        name="host_limits_ignored",
        window=111,
        invariants=(29,),
        what="A job ignores its host limits and uses all its tasks in flight for one host.",
        apply=swap("actors.poller.host_limiter:HostLimiter._pool", _use_cap_of_job),
        world={"is_fault_free": True, "client_profile": "polite", "client_speed": 10.0},
    ),
    Mutant(
        name="pack_name_not_synced",
        window=113,
        invariants=(66,),
        what="The directory entry of a pack is not synced when its first body is.",
        apply=swap("conveyor.engines.sqlite.pack_files:sync_directory", _do_not_sync),
        engines=("embedded",),
        world={"conditions": POWER_CUTS},
    ),
    Mutant(
        name="pack_bytes_not_synced",
        window=113,
        invariants=(66,),
        what="A body in a pack counts as stored before its bytes are synced.",
        apply=swap("conveyor.engines.sqlite.pack_files:PackFiles._write", _write_without_sync),
        engines=("embedded",),
        world={"conditions": POWER_CUTS},
    ),
    Mutant(
        name="body_bytes_not_synced",
        window=113,
        invariants=(66,),
        what="A body outside packs gets its name before its bytes are synced.",
        apply=swap("conveyor.engines.sqlite.blobs:_sync", _close_without_sync),
        engines=("embedded",),
        world={"conditions": POWER_CUTS, "sync_tasks_max": 5, "at_once_max": 0},
    ),
)
