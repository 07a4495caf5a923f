"""The clients that `bench awsclient` compares; each runs alone in its own process.

`python -m bench.awsclient_variants ARM OPERATION URL COUNT INFLIGHT` prints the CPU microseconds
that this process used per call. Connections are opened and API models are loaded before the
measurement starts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from random import Random
from typing import Any

import trio

from conveyor.domain.submit.target import TargetPolicy
from conveyor.engines.aws.client.auth import AwsAccess, StaticAccess
from conveyor.engines.aws.client.boto_transport import open_boto_transport
from conveyor.engines.aws.client.client import AwsTransport, RetryingAwsClient
from conveyor.engines.aws.client.http_transport import HttpTransport
from conveyor.engines.aws.client.usage import Meter
from conveyor.engines.aws_signature import Credentials
from conveyor.http_client.connection_limits import PoolLimits
from conveyor.http_client.pool import HttpPool

DEADLINE_S = 60.0


def _row(number: int) -> dict[str, Any]:
    return {
        "pk": {"S": "Job#01JD0000000000000000000000#TS3"},
        "sk": {"S": f"Task#01JD0000000000000000000001#{number:026}"},
        "status": {"S": "pending"},
        "index": {"N": str(number)},
        "url": {"S": f"https://example.com/a/page/somewhere?id={number}"},
        "claim": {"N": "0"},
        "attempts": {"N": "0"},
        "created_at": {"N": "1790000000.123"},
    }


_KEY = {name: _row(1)[name] for name in ("pk", "sk")}
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "ReceiveMessage": (
        "sqs",
        {
            "QueueUrl": "http://127.0.0.1/000000000000/run",
            "MaxNumberOfMessages": 10,
            "VisibilityTimeout": 60,
            "MessageSystemAttributeNames": ["ApproximateReceiveCount"],
        },
    ),
    "UpdateItem": (
        "dynamodb",
        {
            "TableName": "conveyor",
            "Key": _KEY,
            "UpdateExpression": "SET #s = :done, claim = :next",
            "ConditionExpression": "claim = :was AND #s IN (:pending)",
            "ExpressionAttributeNames": {"#s": "status"},
            "ExpressionAttributeValues": {
                ":done": {"S": "done"},
                ":pending": {"S": "pending"},
                ":was": {"N": "2"},
                ":next": {"N": "3"},
            },
            "ReturnValues": "UPDATED_NEW",
        },
    ),
    "BatchWriteItem": (
        "dynamodb",
        {"RequestItems": {"conveyor": [{"PutRequest": {"Item": _row(n)}} for n in range(25)]}},
    ),
    "PutObject": (
        "s3",
        {"Bucket": "conveyor", "Key": "bodies/01JD/0001-1", "Body": b"x" * 20_000},
    ),
}


@asynccontextmanager
async def _a_lean_plane(access: AwsAccess) -> AsyncGenerator[HttpTransport, None]:
    pool = HttpPool(TargetPolicy(allow_private=True), PoolLimits(trusts_peers=True))
    yield HttpTransport(access=access, pool=pool, now=time.time)
    pool.close()


async def measure(arm: str, operation: str, url: str, count: int, inflight: int) -> float:
    service, params = CALLS[operation]
    access = StaticAccess("us-east-1", Credentials("AKIDEXAMPLE", "secret"), {service: url})
    opened = open_boto_transport(access) if arm == "aioboto3" else _a_lean_plane(access)
    async with opened as transport:
        call = partial(_caller(arm, transport), service, operation, params)

        async def work(numbers: Iterator[int]) -> None:
            for _ in numbers:
                await call()

        async def all_at_once(count: int) -> None:
            numbers = iter(range(count))
            async with trio.open_nursery() as nursery:
                for _ in range(inflight):
                    nursery.start_soon(work, numbers)

        await all_at_once(4 * inflight)
        started_at = time.process_time()
        await all_at_once(count)
        return (time.process_time() - started_at) / count * 1e6


def _caller(arm: str, transport: AwsTransport) -> Any:
    match arm:
        case "seam":
            return RetryingAwsClient(transport=transport, random=Random(1)).call
        case "metered":
            return RetryingAwsClient(transport=transport, random=Random(1), meter=Meter()).call
        case _:
            return partial(transport.call, deadline_s=DEADLINE_S)


if __name__ == "__main__":
    name, operation_name, address, calls, at_once = sys.argv[1:]
    print(trio.run(measure, name, operation_name, address, int(calls), int(at_once)))
