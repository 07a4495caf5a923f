"""Probes of the AWS engine: a recording client stores the calls to its services."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import trio

from conveyor.domain.changes import JobKey, SettleChange
from conveyor.domain.ids import LeaseId, TaskId
from conveyor.domain.model import Result
from conveyor.domain.queries import TasksOf
from conveyor.domain.run import settlement
from conveyor.domain.run.settlement import Cost
from conveyor.engines.aws.coordinator import DynamoCoordinator
from conveyor.engines.aws.dynamodb import deletion, queries, transactions
from conveyor.engines.aws.dynamodb.items import to_item
from conveyor.engines.aws.dynamodb.table import Table
from conveyor.engines.aws.packs import Packing, Packs
from conveyor.engines.redis.coordinator import RedisCoordinator
from conveyor.ports.errors import Unavailable
from conveyor.simulation.models import FaultSource, RedisModel
from tests.builders import JOB, RUN, T0, ManualClock, a_job, a_ref, a_task, key_of
from tests.mutants.two_store_probe import changes_of_two_stores


@dataclass
class RecordingClient:
    """A client whose rows are jobs of four shards. In a batch of reads it leaves all keys but the
    first unprocessed. Of two inserts it throttles the second; of more it omits the answers."""

    calls: list[tuple[str, Any]] = field(default_factory=list)

    async def call(
        self, service: str, operation: str, params: Any, *, attempts_max: int = 1
    ) -> Any:
        await trio.lowlevel.checkpoint()
        self.calls.append((operation, params))
        job = a_job(shard_count=4)
        item = to_item(key_of(job), job)
        if operation == "BatchGetItem":
            first, *later = params["RequestItems"]["table"]["Keys"]
            answer: dict[str, Any] = {"Responses": {"table": [item | first]}}
            return answer | {"UnprocessedKeys": {"table": {"Keys": later}} if later else {}}
        if operation == "BatchExecuteStatement":
            return {"Responses": [{}, {"Error": {"Code": "ThrottlingError"}}]}
        return {"Item": item} if operation == "GetItem" else {}

    def open(
        self, service: str, operation: str, params: Any
    ) -> AbstractAsyncContextManager[dict[str, Any]]:
        raise NotImplementedError


def _table(client: RecordingClient) -> Table:
    return Table(name="table", client=client, random=Random(1))


async def a_read(client: RecordingClient) -> object:
    await _table(client).get(JobKey(JOB))
    return client.calls


async def a_read_of_many(client: RecordingClient) -> object:
    places = [("a", "1"), ("a", "2"), ("a", "3")]
    return list(await _table(client).get_items(places))


async def a_page_behind_a_cursor(client: RecordingClient) -> object:
    query = TasksOf(job_id=JOB, run_id=RUN, shard_count=3, after=TaskId("x"), limit=10)
    await queries.find(_table(client), query)
    return len(client.calls)


async def shards_to_delete(client: RecordingClient) -> object:
    return await deletion._shard_count(_table(client), JOB)


async def an_insert(client: RecordingClient, count: int = 2) -> object:
    items = [{"pk": {"S": "a"}, "sk": {"S": str(number)}} for number in range(count)]
    try:
        return await _table(client).insert(items), client.calls
    except Unavailable:
        return "unknown"


async def a_release(client: RecordingClient) -> object:
    coordinator = DynamoCoordinator(client, "table", clock=ManualClock(), random=Random(1))
    await coordinator.release([LeaseId("pool#3#token")])
    return client.calls


async def a_settle(client: RecordingClient) -> object:
    result = Result("key", 1, "sha", "text/html", 200)
    change = settlement.succeed(a_ref(), a_task(claim=1), result, spent=Cost(), now=T0)
    assert isinstance(change, SettleChange)
    await transactions._apply_group(_table(client), [(0, change)])
    return [operation for operation, _ in client.calls]


async def two_at_once_for_one_lease(_: RecordingClient) -> object:
    model = RedisModel(clock=ManualClock(), fault_source=FaultSource(random=Random(1)))
    taken: list[LeaseId] = []

    async def take(number: int) -> None:
        coordinator = RedisCoordinator(model.link(), Random(number), space="probe")
        taken.extend(await coordinator.acquire(JOB, RUN, count_max=1, cap=1, ttl_s=30))

    async with trio.open_nursery() as nursery:
        for number in range(2):
            nursery.start_soon(take, number)
    return len(taken)


async def bodies_in_packs(_: RecordingClient) -> object:
    """Adds bodies of two runs, a body that S3 refuses, and one beside a cancelled add."""
    objects: dict[str, bytes] = {}
    stored: list[object] = []

    async def put(key: str, body: bytes) -> None:
        await trio.sleep(0.1)
        if b"refused" in body:
            raise Unavailable("not now")
        objects[key] = body

    async def add(prefix: str, body: bytes) -> None:
        try:
            stored.append(await packs.add(prefix, body))
        except Unavailable:
            stored.append("refused")

    packs = Packs(put, Random(1), Packing(wait_s=1.0))
    for bodies in (("one", "two", "three"), ("refused",), ("kept",)):
        async with trio.open_nursery() as nursery:
            with trio.move_on_after(0.5 if bodies == ("kept",) else 10.0):
                async with trio.open_nursery() as cancelled:
                    cancelled.start_soon(add, "jobs/j/runs/1", b"first")
                    await trio.sleep(0.1)
                    for number, body in enumerate(bodies):
                        nursery.start_soon(add, f"jobs/j/runs/{number % 2}", body.encode())
                    await trio.sleep(1.0)
        stored.append(trio.current_time())
    return stored, objects


AWS_PROBES: dict[str, Callable[[RecordingClient], Awaitable[object]]] = {
    "rows_read_as_they_come": a_read,
    "leftovers_of_a_read_dropped": a_read_of_many,
    "page_drops_a_shard": a_page_behind_a_cursor,
    "scrub_of_one_shard": shards_to_delete,
    "throttled_insert_is_done": an_insert,
    "first_insert_answers_for_all": an_insert,
    "lost_inserts_are_done": partial(an_insert, count=3),
    **dict.fromkeys(
        (
            "pack_part_at_wrong_offset",
            "settled_before_pack_is_stored",
            "pack_of_several_runs",
            "pack_failure_forgotten",
            "pack_name_used_again",
        ),
        bodies_in_packs,
    ),
    **dict.fromkeys(
        (
            "second_part_not_stored",
            "second_part_first",
            "half_written_change_stays",
            "checkpoint_before_rows",
            "step_counted_apart",
            "run_deleted_before_its_tasks",
        ),
        changes_of_two_stores,
    ),
    "lease_released_by_anybody": a_release,
    "redis_counted_before_it_is_asked": two_at_once_for_one_lease,
    "count_apart_from_flip": a_settle,
}
"""The probe of each mutant, by its name."""
