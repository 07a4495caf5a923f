"""The AWS engine with a store of its own for tasks, on Postgres (docs/engines.md, Two stores).

Only the composition root imports this module, because it needs the packages of both extras.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random

from actors.runtime import Child
from conveyor.bootstrap.aws import AwsRuntime, create_aws_resources, open_shared
from conveyor.bootstrap.postgres import config_of, migrate_tables
from conveyor.config import Settings
from conveyor.domain import ids
from conveyor.engines.postgres.engine import open_postgres
from conveyor.engines.two_stores import SplitStore
from conveyor.ports.clock import Clock
from conveyor.ports.coordinator import Signals
from conveyor.ports.queue import Queue
from conveyor.ports.store import Store


@asynccontextmanager
async def open_two_stores(
    settings: Settings, *, clock: Clock, random: Random, owner: str, local: Signals
) -> AsyncGenerator[AwsRuntime, None]:
    """Opens the AWS engine and the store of its tasks."""
    async with (
        open_shared(settings, clock=clock, random=random, owner=owner, local=local) as shared,
        open_postgres(config_of(settings), random=random) as postgres,
    ):
        yield split(shared, postgres.store, clock=clock, random=random)


def split(shared: AwsRuntime, tasks: Store, *, clock: Clock, random: ids.Random) -> AwsRuntime:
    """Makes one store of that of the engine and one for tasks."""
    store = split_store(shared.store, tasks, shared.queue, clock=clock, random=random)
    finisher = Child("crossing_finisher", run=store.finish_forever)
    # Counters in the task store are one row, which costs no more to read than a cache.
    return replace(shared, store=store, listeners=[*shared.listeners, finisher], cache=None)


def split_store(
    records: Store, tasks: Store, queue: Queue, *, clock: Clock, random: ids.Random
) -> SplitStore:
    return SplitStore(
        records,
        tasks,
        queue,
        now=clock.now,
        new_token=lambda: ids.mint_ulid(clock.now(), random),
    )


async def create_two_stores(settings: Settings, *, clock: Clock, random: Random) -> Sequence[str]:
    """Creates what both need and does not exist. Returns the names of all of it."""
    names = await create_aws_resources(settings, clock=clock, random=random)
    return [*names, await migrate_tables(settings)]
