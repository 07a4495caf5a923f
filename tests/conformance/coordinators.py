"""The table of coordinators that the laws are tested with."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

import pytest

from conveyor.engines.aws.coordinator import DynamoCoordinator
from conveyor.engines.redis.connection import CoredisConnection, Script, open_link
from conveyor.engines.redis.coordinator import RedisCoordinator
from conveyor.ports.clock import Clock
from conveyor.ports.coordinator import Coordinator
from conveyor.simulation.models import FaultSource, RedisModel
from tests.aws import an_access, an_aws_client, an_http_transport
from tests.builders import ServerClock
from tests.conformance.engines import ENGINES

# On a busy machine a server may take longer to answer than a worker would wait for it.
REDIS_ANSWER_S = 60.0


class LinkAt(CoredisConnection):
    """A connection that runs scripts on the real server with the time of the test's clock."""

    def __init__(self, inner: CoredisConnection, clock: Clock) -> None:
        vars(self).update(vars(inner))
        self._clock = clock

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[str | int]) -> Any:
        now = f"{{ {int(self._clock.steady())}, {int(self._clock.steady() % 1 * 1e6)} }}"
        text = script.text.replace("redis.call('TIME')", now)
        assert now in text
        return await (await self._get_client()).eval(text, keys, args)


def a_space() -> str:
    """Returns the name of a part of a shared server, for one test."""
    return f"test-{SystemRandom().getrandbits(64):x}"


@asynccontextmanager
async def _of_engine(
    name: str, request: pytest.FixtureRequest, clock: Clock
) -> AsyncGenerator[Coordinator, None]:
    tmp_path: Path = request.getfixturevalue("tmp_path")
    async with ENGINES[name](tmp_path, clock, Random(1)) as engine:
        yield engine.coordinator


@asynccontextmanager
async def _on_redis(
    name: str, request: pytest.FixtureRequest, clock: Clock
) -> AsyncGenerator[Coordinator, None]:
    async with open_link(request.getfixturevalue(name)) as link:
        yield RedisCoordinator(
            LinkAt(link, clock), Random(1), space=a_space(), deadline_s=REDIS_ANSWER_S
        )


@asynccontextmanager
async def _on_modelled_redis(
    name: str, request: pytest.FixtureRequest, clock: Clock
) -> AsyncGenerator[Coordinator, None]:
    model = RedisModel(clock=ServerClock(clock), fault_source=FaultSource(random=Random(1)))
    yield RedisCoordinator(model.link(), Random(1), space=a_space())


@asynccontextmanager
async def _on_dynamo(
    name: str, request: pytest.FixtureRequest, clock: Clock
) -> AsyncGenerator[Coordinator, None]:
    """`skew_s` is 0, because all clocks agree here."""
    table = a_space()
    async with an_http_transport(
        an_access(dynamodb=request.getfixturevalue("ministack"))
    ) as transport:
        client = an_aws_client(transport)
        await client.call("dynamodb", "CreateTable", a_table_of_leases(table))
        yield DynamoCoordinator(client, table, clock=clock, random=Random(1), skew_s=0.0)


def a_table_of_leases(name: str) -> dict[str, Any]:
    """The CreateTable parameters that a coordinator needs."""
    kinds = {"pk": "HASH", "sk": "RANGE"}
    return {
        "TableName": name,
        "BillingMode": "PAY_PER_REQUEST",
        "KeySchema": [{"AttributeName": key, "KeyType": kinds[key]} for key in kinds],
        "AttributeDefinitions": [{"AttributeName": key, "AttributeType": "S"} for key in kinds],
    }


Opener = Callable[[str, pytest.FixtureRequest, Clock], AbstractAsyncContextManager[Coordinator]]
COORDINATORS: dict[str, Opener] = {
    **dict.fromkeys(
        ("aws-modelled", "embedded", "memory", "postgres", "postgres-modelled"), _of_engine
    ),
    "dynamo": _on_dynamo,
    "redis": _on_redis,
    "redis-modelled": _on_modelled_redis,
    "redis_cluster": _on_redis,
}
