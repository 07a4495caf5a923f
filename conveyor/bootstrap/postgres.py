"""The shared engine of a process on Postgres (docs/engines.md, Postgres engine).

Rows, queues, leases and signals are in one database; bodies are in a shared folder or a bucket.
Only the composition root imports this module, because it needs the packages of the `postgres`
extra.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from random import Random

from actors.cross_process_signals import CrossProcessSignals
from actors.runtime import Child
from conveyor.config import Settings
from conveyor.engines.postgres.database import Database, DatabaseConfig
from conveyor.engines.postgres.engine import check_secret, create_tables, open_postgres
from conveyor.engines.sqlite.shared_blobs import make_shared_folder, open_shared_blobs
from conveyor.ports.blobs import Blobs
from conveyor.ports.clock import Clock
from conveyor.ports.coordinator import Coordinator, Signals
from conveyor.ports.queue import Queue
from conveyor.ports.secret_box import SecretBox
from conveyor.ports.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresRuntime:
    store: Store
    queue: Queue
    blobs: Blobs
    coordinator: Coordinator
    signals: CrossProcessSignals
    listeners: Sequence[Child]
    database: Database

    async def check_secret(self, secret_box: SecretBox) -> None:
        await check_secret(self.database, secret_box)


@asynccontextmanager
async def open_postgres_runtime(
    settings: Settings,
    *,
    clock: Clock,
    random: Random,
    owner: str,
    local: Signals,
    migrates: bool,
) -> AsyncGenerator[PostgresRuntime, None]:
    """Opens the engine. `local` are the signals of this process's worker, to which the `listeners`
    pass on what they receive."""
    async with (
        open_postgres(config_of(settings), random=random, migrates=migrates) as engine,
        open_blobs(
            settings, clock=clock, random=random, owner=owner, makes_folder=migrates
        ) as blobs,
    ):
        listen = partial(engine.notifier.listen_forever, local.run_changed, local.batch_opened)
        yield PostgresRuntime(
            store=engine.store,
            queue=engine.queue,
            blobs=blobs,
            coordinator=engine.coordinator,
            signals=CrossProcessSignals(
                coordinator=engine.coordinator,
                local=local,
                tell=engine.notifier.run_changed,
                notify=engine.notifier.batch_opened,
                can_abandon=settings.gateway_url != "direct",
            ),
            listeners=[Child("signal_listener", run=listen)],
            database=engine.database,
        )


async def migrate_tables(settings: Settings) -> str:
    """Brings the tables up to date. Returns what they are called for people."""
    version = await create_tables(config_of(settings))
    return f"tables of schema version {version}"


async def create_postgres_resources(
    settings: Settings, *, clock: Clock, random: Random
) -> Sequence[str]:
    """Creates what the engine needs and does not exist. Returns the names of all of it."""
    tables = await migrate_tables(settings)
    if settings.postgres.blob_dir is not None:
        await make_shared_folder(settings.postgres.blob_dir, now=clock.now())
        return [tables, f"folder {settings.postgres.blob_dir}"]
    from conveyor.engines.aws.engine import create_s3_bucket

    bucket = await create_s3_bucket(
        settings.bucket,
        clock=clock,
        random=random,
        body_days=settings.body_days,
        call_timeout_s=settings.aws_timeout_s,
    )
    return [tables, bucket]


def config_of(settings: Settings) -> DatabaseConfig:
    return DatabaseConfig(
        url=settings.postgres.database_url,
        password_file=settings.postgres.database_password_file,
        has_sessions=settings.postgres.database_pooling == "session",
        connections_max=settings.postgres.database_connections,
    )


@asynccontextmanager
async def open_blobs(
    settings: Settings, *, clock: Clock, random: Random, owner: str, makes_folder: bool
) -> AsyncGenerator[Blobs, None]:
    """Opens the bodies, in the folder or the bucket of the settings. Raises FolderUnusable if there
    is no folder, unless this process makes it."""
    if settings.postgres.blob_dir is None:
        from conveyor.engines.aws.engine import open_s3_blobs
        from conveyor.engines.aws.packs import Packing

        async with open_s3_blobs(
            settings.bucket,
            clock=clock,
            random=random,
            call_timeout_s=settings.aws_timeout_s,
            packing=Packing.of(wait_ms=settings.pack_wait_ms, concurrency=settings.concurrency),
        ) as s3_blobs:
            yield s3_blobs
        return
    async with open_shared_blobs(
        settings.postgres.blob_dir, clock=clock, random=random, owner=owner, makes=makes_folder
    ) as file_blobs:
        yield file_blobs
