"""Transports and clients for tests of the AWS engine, over local servers that stand in for AWS."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from random import Random
from typing import Protocol

import trio

from conveyor.domain.submit.target import TargetPolicy
from conveyor.engines.aws.client.auth import AwsAccess, StaticAccess
from conveyor.engines.aws.client.client import Answer, AwsTransport, Params, RetryingAwsClient
from conveyor.engines.aws.client.http_transport import HttpTransport
from conveyor.engines.aws.client.usage import Meter
from conveyor.engines.aws.dynamodb import create_table
from conveyor.engines.aws.dynamodb.keys import TTL
from conveyor.engines.aws.dynamodb.table import Table
from conveyor.engines.aws.engine import AwsEngine, Names, build_engine, check_resources
from conveyor.engines.aws.errors import NoResponse
from conveyor.engines.aws_signature import Credentials
from conveyor.http_client.connection_limits import PoolLimits
from conveyor.http_client.pool import HttpPool
from conveyor.ports.clock import Clock
from conveyor.simulation.models import AwsModel
from tests.servers import ACCESS_KEY, SECRET_KEY

REGION = "us-east-1"
# A local server on a busy machine may take longer to answer than AWS does.
CALL_TIMEOUT_S = 60.0

OpenTransport = Callable[[AwsAccess], AbstractAsyncContextManager[AwsTransport]]


def an_access(**endpoints: str) -> StaticAccess:
    return StaticAccess(REGION, Credentials(ACCESS_KEY, SECRET_KEY), endpoints)


@asynccontextmanager
async def an_http_transport(access: AwsAccess) -> AsyncGenerator[HttpTransport, None]:
    pool = HttpPool(TargetPolicy(allow_private=True), PoolLimits(trusts_peers=True))
    try:
        yield HttpTransport(access=access, pool=pool, now=time.time)
    finally:
        pool.close()


def a_boto_transport(access: AwsAccess) -> AbstractAsyncContextManager[AwsTransport]:
    # Imported here: trio-asyncio 0.16 cannot be imported on Python 3.14.
    from conveyor.engines.aws.client.boto_transport import open_boto_transport

    return open_boto_transport(access)


TRANSPORTS: dict[str, OpenTransport] = {"lean": an_http_transport, "boto": a_boto_transport}


class Faults(Protocol):
    """Faults that a test injects into an attempt: waiting, or raising AwsError or NoResponse."""

    async def before(self, service: str, operation: str, params: Params) -> None:
        """Runs before the attempt: the call has had no effect yet."""

    async def after(self, service: str, operation: str, params: Params) -> None:
        """Runs after the attempt: the call was applied, but its response has not arrived yet."""


@dataclass(frozen=True, slots=True)
class FaultyTransport:
    """A transport with faults around each call. A delay ends at the deadline of the call."""

    transport: AwsTransport
    faults: Faults

    async def call(
        self, service: str, operation: str, params: Params, *, deadline_s: float
    ) -> Answer:
        ends_at = trio.current_time() + deadline_s
        with _until(ends_at, was_sent=False):
            await self.faults.before(service, operation, params)
        answer = await self.transport.call(
            service, operation, params, deadline_s=ends_at - trio.current_time()
        )
        with _until(ends_at, was_sent=True):
            await self.faults.after(service, operation, params)
        return answer

    @asynccontextmanager
    async def open(
        self, service: str, operation: str, params: Params, *, deadline_s: float
    ) -> AsyncGenerator[Answer, None]:
        ends_at = trio.current_time() + deadline_s
        with _until(ends_at, was_sent=False):
            await self.faults.before(service, operation, params)
        async with self.transport.open(service, operation, params, deadline_s=deadline_s) as answer:
            with _until(ends_at, was_sent=True):
                await self.faults.after(service, operation, params)
            yield answer


@contextmanager
def _until(ends_at: float, *, was_sent: bool) -> Iterator[None]:
    with trio.CancelScope(deadline=ends_at) as scope:
        yield
    if scope.cancelled_caught:
        raise NoResponse("no answer before the deadline", was_sent=was_sent)


def an_aws_client(
    transport: AwsTransport,
    *,
    faults: Faults | None = None,
    deadline_s: float = CALL_TIMEOUT_S,
) -> RetryingAwsClient:
    """Makes a client with its own meter, which also counts bytes if the transport does."""
    meter = Meter(traffic=transport.traffic) if isinstance(transport, HttpTransport) else Meter()
    return RetryingAwsClient(
        transport=transport if faults is None else FaultyTransport(transport, faults),
        random=Random(1),
        meter=meter,
        deadline_s=deadline_s,
    )


async def a_modelled_engine(
    model: AwsModel, names: Names, *, clock: Clock, random: Random
) -> AwsEngine:
    """Opens the whole AWS engine on a model. Rows do not expire, as in `a_table`."""
    client = RetryingAwsClient(transport=model, random=random, meter=Meter())
    await check_resources(client, names, region=REGION)
    await _keep_rows(client, names.table)
    return await build_engine(client, model, names, clock=clock, random=random)


async def a_table(client: RetryingAwsClient, name: str) -> Table:
    """Creates a table whose rows do not expire: the server would compare their expiry, which starts
    at the tests' T0, with the real time."""
    await create_table(client, name)
    await _keep_rows(client, name)
    assert client.meter is not None
    # Random, because the server remembers the transaction tokens of all tables of all tests.
    return Table(name=name, client=client, random=Random(), meter=client.meter)


async def _keep_rows(client: RetryingAwsClient, table: str) -> None:
    expiry = {"AttributeName": TTL, "Enabled": False}
    await client.call(
        "dynamodb", "UpdateTimeToLive", {"TableName": table, "TimeToLiveSpecification": expiry}
    )
