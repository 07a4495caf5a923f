"""The modelled AWS services and Redis as one process sees them: each call passes its fault
injector.

The process may be killed after any effect, on any service, and between two pieces of a body that it
reads.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    aclosing,
    asynccontextmanager,
)
from dataclasses import dataclass
from typing import Any

from conveyor.engines.aws.client.client import Answer, Params
from conveyor.engines.aws.client.service_clock import ServiceClock
from conveyor.engines.aws.errors import NoResponse
from conveyor.engines.redis.connection import RedisConnection, Script
from conveyor.simulation.backends.storage_outage import PIECE
from conveyor.simulation.faults.fault_injector import FaultInjector
from conveyor.simulation.models.aws import AwsModel

_WRITES = frozenset(
    {
        "BatchExecuteStatement",
        "BatchWriteItem",
        "DeleteItem",
        "PutItem",
        "TransactWriteItems",
        "UpdateItem",
    }
)
_READS = frozenset(
    {"GetQueueUrl", "GetQueueAttributes", "GetObject", "HeadObject", "ListObjectsV2"}
)


@dataclass(frozen=True, slots=True)
class FaultyTransport:
    """Implements AwsTransport. Answers of DynamoDB correct `service_clock`, as in HttpTransport."""

    model: AwsModel
    injector: FaultInjector
    service_clock: ServiceClock

    async def call(
        self, service: str, operation: str, params: Params, *, deadline_s: float
    ) -> Answer:
        async def act() -> Answer:
            self.injector.trace.note(
                self.injector.name, f"{service}.{operation}", _subject_of(params), is_minor=True
            )
            sent_at = self.service_clock.steady()
            answer = await self.model.call(service, operation, params, deadline_s=deadline_s)
            if service == "dynamodb":
                date = float(int(self.model.clock.now()))
                self.service_clock.correct(date, sent_at=sent_at)
            return answer

        return await self.injector.call(
            service,
            operation,
            act,
            is_write=operation in _WRITES,
            has_effect=service != "dynamodb" and operation not in _READS,
        )

    @asynccontextmanager
    async def open(
        self, service: str, operation: str, params: Params, *, deadline_s: float
    ) -> AsyncGenerator[Answer, None]:
        opened = self.model.open(service, operation, params, deadline_s=deadline_s)
        async with AsyncExitStack() as stack:
            answer = await self.injector.call(
                service, operation, lambda: stack.enter_async_context(opened), is_write=False
            )
            yield {**answer, "Body": self._read_pieces(f"{PIECE}{operation}", answer["Body"])}

    async def _read_pieces(
        self, name: str, body: AsyncGenerator[bytes, None]
    ) -> AsyncGenerator[bytes, None]:
        """Yields the pieces of a body. Between pieces the process may be paused or killed, and the
        storage may fail."""
        async with aclosing(body):
            while True:
                try:
                    piece = await self.injector.call(
                        "s3", name, lambda: anext(body), is_write=False
                    )
                except StopAsyncIteration:
                    return
                yield piece


@dataclass(frozen=True, slots=True)
class FaultyRedis:
    """Implements RedisConnection. `restored` collects the pools into which leases were restored
    after an outage; a restore ignores the cap of the pool."""

    connection: RedisConnection
    injector: FaultInjector
    restored: set[str]

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[str | int]) -> Any:
        if script.name == "restore":
            self.restored.update(keys)
        return await self._pass("run", lambda: self.connection.run(script, keys, args))

    async def get(self, key: str) -> str | None:
        value: str | None = await self._pass("get", lambda: self.connection.get(key))
        return value

    async def put(self, key: str, text: str, *, ttl_s: float) -> None:
        await self._pass("put", lambda: self.connection.put(key, text, ttl_s=ttl_s))

    async def drop(self, key: str, members: Sequence[str]) -> None:
        await self._pass("drop", lambda: self.connection.drop(key, members))

    async def publish(self, channel: str, text: str) -> None:
        await self._pass("publish", lambda: self.connection.publish(channel, text))

    def subscribe(
        self, channel: str
    ) -> AbstractAsyncContextManager[AsyncIterator[Mapping[str, Any]]]:
        return self.connection.subscribe(channel)

    async def _pass(self, command: str, act: Callable[[], Any]) -> Any:
        async def noted() -> Any:
            self.injector.trace.note(self.injector.name, f"redis.{command}", is_minor=True)
            return await act()

        try:
            return await self.injector.call(
                "redis", command, noted, is_write=False, has_effect=command != "get"
            )
        except NoResponse as error:
            raise ConnectionRefusedError(str(error)) from None


def _subject_of(params: Params) -> str:
    """The row or object that a call is about, for the trace."""
    key = params.get("Key") or params.get("Item")
    if isinstance(key, Mapping):
        return f"{key.get('pk', {}).get('S')} {key.get('sk', {}).get('S')}"
    if isinstance(key, str):
        return key
    steps = params.get("TransactItems") or params.get("Statements")
    return f"{len(steps)} steps" if steps else str(params.get("QueueUrl", ""))
