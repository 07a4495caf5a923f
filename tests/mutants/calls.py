"""Probes of calls: what the engine on AWS asks of its services, noted by a recording client."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
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
from conveyor.engines.redis.coordinator import RedisCoordinator
from conveyor.simulation.models import FaultSource, RedisModel
from tests.builders import JOB, RUN, T0, ManualClock, a_job, a_ref, a_task, key_of


@dataclass
class RecordingClient:
    """Every row is a job of four shards; of a batch of reads all but the first are put off."""

    asked: list[tuple[str, Any]] = field(default_factory=list)

    async def call(
        self, service: str, operation: str, params: Any, *, attempts_max: int = 1
    ) -> Any:
        await trio.lowlevel.checkpoint()
        self.asked.append((operation, params))
        job = a_job(shard_count=4)
        item = to_item(key_of(job), job)
        if operation == "BatchGetItem":
            first, *later = params["RequestItems"]["table"]["Keys"]
            answer: dict[str, Any] = {"Responses": {"table": [item | first]}}
            return answer | {"UnprocessedKeys": {"table": {"Keys": later}} if later else {}}
        return {"Item": item} if operation == "GetItem" else {}

    def open(
        self, service: str, operation: str, params: Any
    ) -> AbstractAsyncContextManager[dict[str, Any]]:
        raise NotImplementedError


def _table(client: RecordingClient) -> Table:
    return Table(name="table", client=client, random=Random(1))


async def a_read(client: RecordingClient) -> object:
    await _table(client).get(JobKey(JOB))
    return client.asked


async def a_read_of_many(client: RecordingClient) -> object:
    places = [("a", "1"), ("a", "2"), ("a", "3")]
    return list(await _table(client).get_items(places))


async def a_page_behind_a_cursor(client: RecordingClient) -> object:
    query = TasksOf(job_id=JOB, run_id=RUN, shard_count=3, after=TaskId("x"), limit=10)
    await queries.find(_table(client), query)
    return len(client.asked)


async def shards_to_delete(client: RecordingClient) -> object:
    return await deletion._shard_count(_table(client), JOB)


async def a_release(client: RecordingClient) -> object:
    coordinator = DynamoCoordinator(client, "table", clock=ManualClock(), random=Random(1))
    await coordinator.release([LeaseId("pool#3#token")])
    return client.asked


async def a_settle(client: RecordingClient) -> object:
    result = Result("key", 1, "sha", "text/html", 200)
    change = settlement.succeed(a_ref(), a_task(claim=1), result, spent=Cost(), now=T0)
    assert isinstance(change, SettleChange)
    await transactions._apply_group(_table(client), [(0, change)])
    return [operation for operation, _ in client.asked]


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


CALLS: dict[str, Callable[[RecordingClient], Awaitable[object]]] = {
    "rows_read_as_they_come": a_read,
    "leftovers_of_a_read_dropped": a_read_of_many,
    "page_drops_a_shard": a_page_behind_a_cursor,
    "scrub_of_one_shard": shards_to_delete,
    "lease_released_by_anybody": a_release,
    "redis_counted_before_it_is_asked": two_at_once_for_one_lease,
    "count_apart_from_flip": a_settle,
}
"""By the name of the mutant."""
