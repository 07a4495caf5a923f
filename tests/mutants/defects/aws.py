"""Mutants of the AWS engine: ignored partial answers, stale reads, non-atomic writes
(docs/engines.md, DynamoDB store)."""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from conveyor.domain.changes import Change, Chunk
from conveyor.domain.ids import JobId, RunId
from conveyor.domain.model import Run
from conveyor.domain.queries import TasksOf
from conveyor.engines.aws.client.client import ATTEMPTS_MAX
from conveyor.ports.errors import Unavailable
from conveyor.simulation.models.fault_rates import CALM, DynamoFaults, FaultRates, SqsFaults
from conveyor.simulation.profiles import NEVER_S
from conveyor.simulation.swaps import combine, original_of, swap
from conveyor.usecases.context import Context
from tests.mutants.mutant import Mutant

_DYNAMO = "conveyor.engines.aws.dynamodb"


def _count_throttled_as_done(insert: Any) -> Any:
    async def mutated(self: Any, items: Any) -> list[int]:
        await insert(self, items)
        return []

    return mutated


def _read_first_answer_only(insert: Any) -> Any:
    async def mutated(self: Any, items: Any) -> list[int]:
        left = await insert(self, items)
        return left if 0 in left else []

    return mutated


def _count_unanswered_as_done(insert: Any) -> Any:
    async def mutated(self: Any, items: Any) -> list[int]:
        try:
            return list(await insert(self, items))
        except Unavailable:
            return []

    return mutated


def _forget_counted(look: Any) -> Any:
    async def mutated(table: Any, chunk: Chunk) -> Any:
        refusal, _ = await look(table, chunk)
        return refusal, None

    return mutated


def _note_without_condition(noting: Any) -> Any:
    def mutated(table: str, chunk: Chunk, counted: int | None) -> Any:
        params = noting(table, chunk, counted)
        condition = params["ConditionExpression"].rpartition(" AND ")[0]
        return {**params, "ConditionExpression": condition}

    return mutated


def _settle_then_count(_: Any) -> Any:
    async def mutated(table: Any, group: list[tuple[int, Change]]) -> Any:
        changes = [change for _, change in group]
        *flips, count = original_of("conveyor.engines.aws.dynamodb.transactions:_steps")(
            table.name, changes
        )
        judge = original_of("conveyor.domain.changes:find_refusal")
        failed = await table.write_together(flips)
        if failed is None:
            await table.write("UpdateItem", count["Update"])
            return {}
        rows = await table.get_all([write.key for change in changes for write in change.writes])
        refusals = {number: judge(change.writes, rows) for number, change in group}
        refused = {number: verdict for number, verdict in refusals.items() if verdict is not None}
        left = [member for member in group if member[0] not in refused]
        return refused | (await mutated(table, left) if left else {})

    return mutated


def _drop_unprocessed(_: Any) -> Any:
    async def mutated(self: Any, places: Any, *, is_consistent: bool) -> Any:
        keys = [
            original_of("conveyor.engines.aws.dynamodb.table:key_item")(place) for place in places
        ]
        request = {self.name: {"Keys": keys, "ConsistentRead": is_consistent}}
        answer = await self.call("BatchGetItem", {"RequestItems": request})
        return answer.get("Responses", {}).get(self.name, [])

    return mutated


def _read_without_consistency(call: Any) -> Any:
    async def mutated(
        self: Any, operation: str, params: Any, *, attempts_max: int = ATTEMPTS_MAX
    ) -> Any:
        if operation == "GetItem":
            params = {**params, "ConsistentRead": False}
        return await call(self, operation, params, attempts_max=attempts_max)

    return mutated


def _omit_one_shard(ranges_of: Any) -> Any:
    def mutated(query: TasksOf) -> Any:
        if query.after is not None and query.shard_count > 1:
            query = msgspec.structs.replace(query, shard_count=query.shard_count - 1)
        return ranges_of(query)

    return mutated


def _assume_one_shard(_: Any) -> Any:
    async def mutated(table: Any, job_id: JobId) -> int:
        return 1

    return mutated


def _never_resend(_: Any) -> Any:
    async def mutated(env: Context, run: Run, depth: Any, totals: Any) -> int:
        return 0

    return mutated


def _delete_any_lease(_: Any) -> Any:
    async def mutated(self: Any, slot: Any) -> bool:
        return bool(await self._write("DeleteItem", Key=slot.key))

    return mutated


def _use_own_clock(_: Any) -> Any:
    def mutated(self: Any) -> float:
        return float(self.machine.now())

    return mutated


def _count_before_acquire(real: Any) -> Any:
    async def mutated(
        self: Any, job_id: JobId, run_id: RunId, *, count_max: int, cap: int, ttl_s: float
    ) -> Any:
        room = min(count_max, cap - await self.count(run_id))
        if room <= 0:
            return []
        return await real(self, job_id, run_id, count_max=room, cap=sys.maxsize, ttl_s=ttl_s)

    return mutated


_AWS = ("aws",)
_THROTTLED_ROWS = FaultRates(dynamodb=DynamoFaults(unprocessed_rate=0.2))

MUTANTS = (
    Mutant(
        name="throttled_insert_is_done",
        window=5,
        invariants=(2, 11, 21),
        what="A row whose INSERT was throttled counts as inserted.",
        apply=swap(f"{_DYNAMO}.table:Table.insert", _count_throttled_as_done),
        engines=_AWS,
        world={"service_rates": _THROTTLED_ROWS, "sync_tasks_max": 5},
    ),
    Mutant(
        name="first_insert_answers_for_all",
        window=5,
        invariants=(2, 11, 21),
        what="If the first INSERT of a batch was applied, the answers of the others are not read.",
        apply=swap(f"{_DYNAMO}.table:Table.insert", _read_first_answer_only),
        engines=_AWS,
        world={"service_rates": _THROTTLED_ROWS, "sync_tasks_max": 5},
    ),
    Mutant(
        name="lost_inserts_are_done",
        window=5,
        invariants=(2, 11, 21),
        what="A batch of INSERTs without an answer counts as inserted.",
        apply=swap(f"{_DYNAMO}.table:Table.insert", _count_unanswered_as_done),
        engines=_AWS,
        world={"sync_tasks_max": 5},
    ),
    Mutant(
        name="chunk_counted_again",
        window=16,
        invariants=(21, 22),
        what="A chunk that is written again is counted again.",
        apply=combine(
            swap("conveyor.engines.aws.dynamodb.ingest:_check_step", _forget_counted),
            swap("conveyor.engines.aws.dynamodb.ingest:_note_counted", _note_without_condition),
        ),
        engines=_AWS,
    ),
    Mutant(
        name="count_apart_from_flip",
        window=55,
        invariants=(21,),
        what="Tasks are settled in one transaction, and counted in another.",
        apply=swap("conveyor.engines.aws.dynamodb.transactions:_apply_group", _settle_then_count),
        engines=_AWS,
    ),
    Mutant(
        name="leftovers_of_a_read_dropped",
        window=5,
        invariants=(2, 39),
        what="Keys that the table left unprocessed in a batch read count as absent.",
        apply=swap("conveyor.engines.aws.dynamodb.table:Table._get_slice", _drop_unprocessed),
        engines=_AWS,
        world={"service_rates": FaultRates(dynamodb=DynamoFaults(unprocessed_rate=0.2))},
    ),
    Mutant(
        name="rows_read_as_they_come",
        window=7,
        invariants=(39,),
        what="Rows are read without consistency, so a read may be stale.",
        apply=swap("conveyor.engines.aws.dynamodb.table:Table.call", _read_without_consistency),
        engines=_AWS,
        world={"service_rates": FaultRates(dynamodb=DynamoFaults(stale_read_rate=0.3))},
    ),
    Mutant(
        name="page_drops_a_shard",
        window=89,
        invariants=(37,),
        what="After a cursor, a page leaves out one shard.",
        apply=swap("conveyor.engines.aws.dynamodb.queries:_ranges_of", _omit_one_shard),
        engines=_AWS,
        world={"sync_tasks_max": 5, "shard_count": 4, "page_rows": 3},
    ),
    Mutant(
        name="scrub_of_one_shard",
        window=78,
        invariants=(33,),
        what="A deletion assumes that every job has a single shard.",
        apply=swap("conveyor.engines.aws.dynamodb.deletion:_shard_count", _assume_one_shard),
        engines=_AWS,
        world={"client_profile": "tidy", "sync_tasks_max": 5, "shard_count": 4},
    ),
    Mutant(
        name="lost_refs_stay_lost",
        window=42,
        invariants=(2, 20),
        what="Refs that were not sent because of a crash are never sent.",
        apply=swap("conveyor.usecases.run.reconcile:_resend", _never_resend),
        engines=_AWS,
        world={"service_rates": FaultRates(sqs=SqsFaults(retention_s_max=20.0))},
    ),
    Mutant(
        name="lease_released_by_anybody",
        window=45,
        invariants=(29, 30),
        what="Leases use the workers' clocks; an expired holder releases its successor's lease.",
        apply=combine(
            swap("conveyor.engines.aws.coordinator:DynamoCoordinator._drop", _delete_any_lease),
            # With the clock of the service hardly any lease expires while it is held.
            swap("conveyor.engines.aws.client.service_clock:ServiceClock.now", _use_own_clock),
        ),
        engines=_AWS,
        world={
            "has_redis": False,
            "max_inflight": 1,
            "workers_count": 3,
            "offset_s": 60.0,
            "disturb_s": NEVER_S,
            "check_every": 1,
            "service_rates": CALM,
        },
    ),
    Mutant(
        name="redis_counted_before_it_is_asked",
        window=43,
        invariants=(29,),
        what="Leases in Redis are counted first and acquired afterwards, not atomically.",
        apply=swap(
            "conveyor.engines.redis.coordinator:RedisCoordinator.acquire", _count_before_acquire
        ),
        engines=_AWS,
        world={
            "has_redis": True,
            "max_inflight": 1,
            "workers_count": 3,
            "disturb_s": NEVER_S,
            "check_every": 1,
            "service_rates": CALM,
        },
    ),
)
