"""The table of engines that the laws are tested with."""

from __future__ import annotations

import atexit
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from conveyor.engines.aws.coordinator import DynamoCoordinator
from conveyor.engines.aws.dynamodb import DynamoStore
from conveyor.engines.aws.engine import Names
from conveyor.engines.memory import memory_engine
from conveyor.engines.postgres.coordinator import PostgresCoordinator
from conveyor.engines.postgres.database import DatabaseConfig, open_database
from conveyor.engines.postgres.engine import open_postgres
from conveyor.engines.postgres.queue import PostgresQueue
from conveyor.engines.postgres.store import PostgresStore
from conveyor.engines.sqlite import open_engine
from conveyor.engines.two_stores import SplitStore
from conveyor.ports.blobs import Blobs
from conveyor.ports.clock import Clock
from conveyor.ports.coordinator import Coordinator
from conveyor.ports.queue import Queue
from conveyor.ports.store import Store
from conveyor.simulation.models import AwsModel, FaultSource
from conveyor.simulation.models.postgres.server import ModelConnection, Server
from conveyor.simulation.models.postgres.statements import execute
from tests.aws import a_modelled_engine, a_table, an_access, an_aws_client, an_http_transport
from tests.builders import ServerClock
from tests.postgres import empty_tables
from tests.servers import a_ministack, a_postgres


class Engine(Protocol):
    @property
    def store(self) -> Store: ...
    @property
    def queue(self) -> Queue: ...
    @property
    def blobs(self) -> Blobs: ...
    @property
    def coordinator(self) -> Coordinator: ...


Opener = Callable[[Path, Clock, Random], AbstractAsyncContextManager[Engine]]


@asynccontextmanager
async def _open_memory(data_dir: Path, clock: Clock, random: Random) -> AsyncIterator[Engine]:
    yield memory_engine(clock=clock, random=random)


@asynccontextmanager
async def _open_embedded(data_dir: Path, clock: Clock, random: Random) -> AsyncIterator[Engine]:
    async with open_engine(data_dir, clock=clock, random=random, owner="conformance") as engine:
        yield engine


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsEngine:
    """The store on DynamoDB; the other ports are in memory."""

    store: Store
    queue: Queue
    blobs: Blobs
    coordinator: Coordinator


_tables = count()


@cache
def _ministack() -> str:
    """One server for all tests of a process; each test has a table of its own."""
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(a_ministack(Path(stack.enter_context(TemporaryDirectory()))))


@asynccontextmanager
async def _open_aws(data_dir: Path, clock: Clock, random: Random) -> AsyncIterator[Engine]:
    others = memory_engine(clock=clock, random=random)
    name = f"conveyor-{next(_tables)}"
    async with an_http_transport(an_access(dynamodb=_ministack())) as transport:
        client = an_aws_client(transport)
        yield AwsEngine(
            store=DynamoStore(await a_table(client, name), others.queue),
            queue=others.queue,
            blobs=others.blobs,
            coordinator=others.coordinator,
        )
        await client.call("dynamodb", "DeleteTable", {"TableName": name})


@cache
def _postgres() -> str:
    """One server for all tests of a process; each test has a schema of its own."""
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(a_postgres()).url


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresEngine:
    """The ports on Postgres; blobs are in memory, because the engine has none of its own."""

    store: Store
    queue: Queue
    blobs: Blobs
    coordinator: Coordinator


@asynccontextmanager
async def _open_postgres(data_dir: Path, clock: Clock, random: Random) -> AsyncIterator[Engine]:
    async with (
        empty_tables(_postgres()) as url,
        open_postgres(DatabaseConfig(url=url), random=random, instant=clock.steady) as engine,
    ):
        yield PostgresEngine(
            store=engine.store,
            queue=engine.queue,
            blobs=memory_engine(clock=clock, random=random).blobs,
            coordinator=engine.coordinator,
        )


def _split(records: Store, tasks: Store, queue: Queue, clock: Clock) -> SplitStore:
    tokens = map(str, count())
    return SplitStore(records, tasks, queue, now=clock.now, new_token=lambda: next(tokens))


@asynccontextmanager
async def _open_mixed(data_dir: Path, clock: Clock, random: Random) -> AsyncIterator[Engine]:
    """Records on DynamoDB and tasks on Postgres, both on real servers."""
    async with (
        _open_aws(data_dir, clock, random) as aws,
        _open_postgres(data_dir, clock, random) as postgres,
    ):
        store = _split(aws.store, postgres.store, aws.queue, clock)
        assert isinstance(aws, AwsEngine)
        yield replace(aws, store=store)


@asynccontextmanager
async def _open_memories(data_dir: Path, clock: Clock, random: Random) -> AsyncIterator[Engine]:
    """Both stores in memory, as in the simulator."""
    records, tasks = (memory_engine(clock=clock, random=random) for _ in range(2))
    yield AwsEngine(
        store=_split(records.store, tasks.store, records.queue, clock),
        queue=records.queue,
        blobs=records.blobs,
        coordinator=records.coordinator,
    )


@asynccontextmanager
async def _open_modelled_postgres(
    data_dir: Path, clock: Clock, random: Random
) -> AsyncIterator[Engine]:
    """The Postgres engine on a model of the server without faults."""
    server = Server(execute, random)

    async def connect() -> Any:
        return ModelConnection(server, lambda: True)

    async with open_database(DatabaseConfig(url=""), connect=connect) as database:
        yield PostgresEngine(
            store=PostgresStore(database, clock.steady),
            queue=PostgresQueue(database, clock.steady),
            blobs=memory_engine(clock=clock, random=random).blobs,
            coordinator=PostgresCoordinator(database, random, clock.steady),
        )


NAMES = Names(table="conveyor", bucket="conveyor", queue_prefix="conveyor-")


@asynccontextmanager
async def _open_modelled(data_dir: Path, clock: Clock, random: Random) -> AsyncIterator[Engine]:
    """The complete AWS engine on models of its services without faults; all clocks agree."""
    model = AwsModel(clock=ServerClock(clock), fault_source=FaultSource(random=random))
    engine = await a_modelled_engine(model, NAMES, clock=clock, random=random)
    client = an_aws_client(model)
    leases = DynamoCoordinator(client, NAMES.table, clock=clock, random=random, skew_s=0.0)
    yield replace(engine, coordinator=leases)


@asynccontextmanager
async def _open_modelled_store(
    data_dir: Path, clock: Clock, random: Random
) -> AsyncIterator[Engine]:
    """The modelled AWS engine with a memory queue, because SQS may answer differently from
    memory."""
    async with _open_modelled(data_dir, clock, random) as whole:
        assert isinstance(whole.store, DynamoStore)
        queue = memory_engine(clock=clock, random=random).queue
        yield AwsEngine(
            store=DynamoStore(whole.store._table, queue),
            queue=queue,
            blobs=whole.blobs,
            coordinator=whole.coordinator,
        )


ENGINES: dict[str, Opener] = {
    "memory": _open_memory,
    "embedded": _open_embedded,
    "aws": _open_aws,
    "aws-modelled": _open_modelled,
    "mixed": _open_mixed,
    "mixed-modelled": _open_memories,
    "postgres": _open_postgres,
    "postgres-modelled": _open_modelled_postgres,
}

WALKED = {**ENGINES, "aws-modelled": _open_modelled_store}
"""Engines whose answers can be compared, one by one."""


@asynccontextmanager
async def fresh_engine(name: str, clock: Clock, *, seed: int = 1) -> AsyncIterator[Engine]:
    """Opens a new engine of this kind and removes it afterwards, for tests that need one per
    example."""
    with TemporaryDirectory() as data_dir:
        async with WALKED[name](Path(data_dir), clock, Random(seed)) as engine:
            yield engine
