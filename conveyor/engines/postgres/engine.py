"""The Postgres engine: rows, queues, leases and signals in one database (docs/engines.md,
Postgres engine). Bodies are in a shared folder or a bucket, which the composition root adds."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from conveyor.domain.ids import Random
from conveyor.engines.postgres.connection import Statement
from conveyor.engines.postgres.coordinator import PostgresCoordinator
from conveyor.engines.postgres.database import Database, DatabaseConfig, open_database
from conveyor.engines.postgres.migration import refuse_unfinished
from conveyor.engines.postgres.queue import Instant, PostgresQueue
from conveyor.engines.postgres.schema import check_current, migrate
from conveyor.engines.postgres.signals import Notifier
from conveyor.engines.postgres.store import PostgresStore
from conveyor.ports.secret_box import SecretBox, WrongSecret, make_check, opens_check


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresEngine:
    store: PostgresStore
    queue: PostgresQueue
    coordinator: PostgresCoordinator
    notifier: Notifier
    database: Database


@asynccontextmanager
async def open_postgres(
    config: DatabaseConfig,
    *,
    random: Random,
    migrates: bool = False,
    for_migration: bool = False,
    instant: Instant = lambda: None,
) -> AsyncGenerator[PostgresEngine, None]:
    """Opens the engine. Raises NotSetUp if the schema is too old, unless this process migrates it,
    and MigrationRefused while it is filled from another engine, unless this process does so.

    `instant` is the clock of messages and leases; by default that of the server.
    """
    async with open_database(config) as database:
        if migrates:
            await migrate(database)
        await check_current(database)
        if not for_migration:
            await refuse_unfinished(database)
        yield PostgresEngine(
            store=PostgresStore(database, instant),
            queue=PostgresQueue(database, instant),
            coordinator=PostgresCoordinator(database, random, instant),
            notifier=Notifier(database),
            database=database,
        )


async def create_tables(config: DatabaseConfig) -> int:
    """Brings the schema up to date. Returns its version."""
    async with open_database(config) as database:
        return await migrate(database)


async def check_secret(database: Database, secret_box: SecretBox) -> None:
    """Raises WrongSecret if the database was sealed with another secret. The first process stores
    the check."""
    sealed = make_check(secret_box)
    # Of several processes the first one wins.
    insert = "INSERT INTO secret_checks (sealed) VALUES ($1) ON CONFLICT DO NOTHING"
    await database.run(Statement(insert, (sealed,)))
    answer = await database.read(Statement("SELECT sealed FROM secret_checks"))
    if not all(opens_check(secret_box, stored) for (stored,) in answer.rows):
        raise WrongSecret(
            "the database was sealed with another secret key: set CONVEYOR_SECRET_KEY to the one "
            "that its other processes have"
        )
