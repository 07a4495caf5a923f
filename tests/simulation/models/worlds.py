"""Worlds for tests of the models: virtual time, a seed, and faults that a test may change."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import trio

from conveyor.engines.aws.client.client import RetryingAwsClient
from conveyor.engines.aws.client.usage import Meter
from conveyor.engines.aws.engine import AwsEngine, Names, build_engine, check_resources
from conveyor.simulation.models import CALM, AwsModel, FaultRates, FaultSource, RedisModel
from conveyor.simulation.models.fault_rates import (
    CallFaults,
    DynamoFaults,
    RedisFaults,
    S3Faults,
    SqsFaults,
)
from tests.aws import REGION
from tests.builders import T0

NAMES = Names(table="rows", bucket="bodies", queue_prefix="conveyor-")
TABLE, BUCKET = NAMES.table, NAMES.bucket


class TrioClock:
    """A clock whose wall time advances with Trio's."""

    def now(self) -> float:
        return T0 + trio.current_time()

    def steady(self) -> float:
        return T0 + trio.current_time()


@dataclass(slots=True)
class World:
    """The models of all services. Each engine is like a separate process."""

    seed: int = 1
    clock: TrioClock = field(default_factory=TrioClock)
    fault_source: FaultSource = field(init=False)
    aws: AwsModel = field(init=False)
    redis: RedisModel = field(init=False)

    def __post_init__(self) -> None:
        self.fault_source = FaultSource(random=Random(self.seed))
        self.aws = AwsModel(clock=self.clock, fault_source=self.fault_source)
        self.redis = RedisModel(clock=self.clock, fault_source=self.fault_source)

    def client(self) -> RetryingAwsClient:
        return RetryingAwsClient(transport=self.aws, random=Random(self.seed), meter=Meter())

    async def set_up(self) -> None:
        await check_resources(self.client(), NAMES, region=REGION)

    async def engine(self, number: int = 0) -> AwsEngine:
        return await build_engine(
            self.client(), self.aws, NAMES, clock=self.clock, random=Random(number)
        )

    def set_faults(self, *faults: Faults) -> None:
        """Replaces the current faults by these."""
        kinds: dict[type, str] = {
            CallFaults: "calls",
            DynamoFaults: "dynamodb",
            SqsFaults: "sqs",
            S3Faults: "s3",
            RedisFaults: "redis",
        }
        self.fault_source.service_rates = FaultRates(
            **{kinds[type(fault)]: fault for fault in faults}  # type: ignore[arg-type]
        )

    def clear_faults(self) -> None:
        self.fault_source.service_rates = CALM

    async def dynamodb(self, operation: str, **params: Any) -> dict[str, Any]:
        return await self.aws.call("dynamodb", operation, params, deadline_s=10.0)

    async def sqs(self, operation: str, **params: Any) -> dict[str, Any]:
        return await self.aws.call("sqs", operation, params, deadline_s=30.0)

    async def s3(self, operation: str, **params: Any) -> dict[str, Any]:
        request = {"Bucket": BUCKET, **params}
        return await self.aws.call("s3", operation, request, deadline_s=60.0)


Faults = CallFaults | DynamoFaults | SqsFaults | S3Faults | RedisFaults


def key(name: str, partition: str = "p") -> dict[str, Any]:
    return {"pk": {"S": partition}, "sk": {"S": name}}


def item(name: str, partition: str = "p", **fields: str) -> dict[str, Any]:
    return key(name, partition) | {field: {"S": text} for field, text in fields.items()}
