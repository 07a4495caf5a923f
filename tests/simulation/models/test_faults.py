"""Tests that every fault of the models occurs at high rates, and is counted by its name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from conveyor.engines.aws.dynamodb.table import insert_statement
from conveyor.engines.aws.errors import AwsError, NoResponse
from conveyor.engines.aws.sqs import RUN_ATTRIBUTES
from conveyor.engines.redis.connection import RedisChannel
from conveyor.engines.redis.coordinator import RedisCoordinator
from conveyor.ports.errors import BlobMissing, Unavailable
from conveyor.simulation.models import FAULTS
from conveyor.simulation.models.fault_rates import (
    CallFaults,
    CapacityLimits,
    DynamoFaults,
    RedisFaults,
    S3Faults,
    SqsFaults,
)
from conveyor.simulation.models.sqs import URL
from tests.builders import JOB, RUN
from tests.simulation.models.worlds import TABLE, World, item, key

QUEUE = {"QueueUrl": f"{URL}q"}
ALL_FAULTS = (
    CallFaults(
        refused_rate=0.05, lost_rate=0.05, slow_rate=0.05, stalled_rate=0.02, late_rate=0.02
    ),
    DynamoFaults(
        capacity=CapacityLimits(partition_writes=2, partition_reads=2),
        throttled_shard_rate=0.05,
        unprocessed_rate=0.2,
        conflict_rate=0.2,
        in_progress_rate=0.5,
        stale_read_rate=0.5,
        late_index_rate=0.5,
        late_expiry_rate=0.3,
        never_expires_rate=0.3,
        short_page_rate=0.5,
    ),
    SqsFaults(
        duplicate_rate=0.2,
        undead_rate=0.2,
        reordered_rate=0.5,
        false_empty_rate=0.2,
        lost_receive_rate=0.2,
        stale_receipt_rate=0.5,
        visibility_drift=0.1,
        unseen_rate=0.5,
        ghost_rate=0.5,
        in_flight_max=5,
        retention_s_max=60.0,
        partial_batch_rate=0.2,
        garbage_rate=0.2,
    ),
    S3Faults(
        slow_down_rate=0.1,
        slow_rate=0.1,
        lost_put_rate=0.1,
        truncated_list_rate=0.5,
        undeleted_rate=0.2,
        left_open_rate=0.5,
        broken_read_rate=0.2,
    ),
    RedisFaults(
        down_rate=0.02,
        down_s=(0.0, 5.0),
        failover_rate=0.05,
        split_rate=0.05,
        evicted_rate=0.05,
        killed_rate=0.05,
        slow_rate=0.1,
        deaf_rate=0.1,
    ),
)


async def call_dynamodb(world: World, number: int) -> None:
    row = item(str(number), g1="o", g1s=str(number)) | {"ttl": {"N": str(int(world.clock.now()))}}
    at = {"TableName": TABLE}
    token = {"ClientRequestToken": str(number)}
    puts = [{"PutRequest": {"Item": item(f"{number}-{n}")}} for n in range(5)]
    inserts = [insert_statement(TABLE, item(f"{number}-{n}")) for n in range(3, 8)]
    keys = [key(f"{number}-{n}") for n in range(5)]
    steps = [{"Put": {**at, "Item": item(f"{number}-t")}}]
    request = {
        "KeyConditionExpression": "pk = :pk",
        "ExpressionAttributeValues": {":pk": {"S": "p"}},
    }
    calls: list[tuple[str, dict[str, Any]]] = [
        ("PutItem", {**at, "Item": row}),
        ("GetItem", {**at, "Key": key(str(number))}),
        ("BatchWriteItem", {"RequestItems": {TABLE: puts}}),
        ("BatchExecuteStatement", {"Statements": inserts}),
        ("BatchGetItem", {"RequestItems": {TABLE: {"Keys": keys}}}),
        ("TransactWriteItems", {"TransactItems": steps, **token}),
        ("TransactWriteItems", {"TransactItems": steps, **token}),
        ("Query", {**at, **request}),
    ]
    for operation, params in calls:
        with suppress(AwsError, NoResponse):
            await world.dynamodb(operation, **params)


async def call_sqs(world: World, number: int) -> None:
    entries = [{"Id": str(n), "MessageBody": str(n)} for n in range(10)]
    with suppress(AwsError, NoResponse):
        await world.sqs("CreateQueue", QueueName="q", Attributes=RUN_ATTRIBUTES)
    with suppress(AwsError, NoResponse):
        await world.sqs("SendMessageBatch", **QUEUE, Entries=entries)
    with suppress(AwsError, NoResponse):
        request = {"MaxNumberOfMessages": 10, "VisibilityTimeout": 5}
        answer = await world.sqs("ReceiveMessage", **QUEUE, **request)
        await world.sqs("ReceiveMessage", **QUEUE, **request)
        await trio.sleep(number % 10)
        receipts = [message["ReceiptHandle"] for message in answer.get("Messages", ())]
        entries = [{"Id": str(n), "ReceiptHandle": receipt} for n, receipt in enumerate(receipts)]
        await world.sqs("DeleteMessageBatch", **QUEUE, Entries=entries)
    if number % 20 == 0:
        with suppress(AwsError, NoResponse):
            await world.sqs("DeleteQueue", **QUEUE)


async def call_s3(world: World, number: int) -> None:
    blobs = (await world.engine()).blobs
    # A deletion of an earlier round may arrive late, after the put.
    with suppress(Unavailable, BlobMissing):
        await blobs.put("k/a", [b"x"])
        await blobs.put("k/b", [b"x"])
        assert [piece async for piece in blobs.open("k/a")] == [b"x"]
        await blobs.delete_prefix("k")
    with suppress(AwsError, NoResponse):
        upload = await world.s3("CreateMultipartUpload", Key="a")
        await world.s3("AbortMultipartUpload", Key="a", UploadId=upload["UploadId"])


async def call_redis(world: World, number: int) -> None:
    link = world.redis.link()
    with suppress(Unavailable):
        coordinator = RedisCoordinator(link, Random(number), space="s")
        await coordinator.acquire(JOB, RUN, count_max=1, cap=1000, ttl_s=60)
    await RedisChannel(link, space="s", owner="o").tell(JOB, RUN)


@pytest.mark.slow
async def test_every_fault_occurs_at_high_rates(world: World, autojump_clock: MockClock) -> None:
    world.set_faults(*ALL_FAULTS)
    calls_of_services: list[Callable[[World, int], Awaitable[None]]] = [
        call_dynamodb,
        call_sqs,
        call_s3,
        call_redis,
    ]

    for number in range(150):
        for call_service in calls_of_services:
            with suppress(Unavailable):
                await call_service(world, number)

    never = [name for name in FAULTS if not world.fault_source.fault_counts[name]]
    assert never == []
