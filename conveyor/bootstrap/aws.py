"""The shared engine of a process: AWS, with or without Redis (docs/engines.md, Embedded engine).

Many processes work on a shared engine; none owns it. Only the composition root imports this module,
because it needs the packages of the `aws` extra.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from actors.cross_process_signals import CrossProcessSignals, Tell, no_notification
from actors.runtime import Child
from conveyor.config import Settings
from conveyor.domain.ids import Random
from conveyor.engines.aws.client.usage import Meter
from conveyor.engines.aws.control_queue import listen_forever
from conveyor.engines.aws.engine import AwsEngine, Names, SecretRow, create_resources, open_aws
from conveyor.engines.aws.packs import Packing
from conveyor.engines.redis import running_on
from conveyor.engines.redis.cache import RedisCache
from conveyor.engines.redis.connection import RedisConnection, open_link
from conveyor.ports.blobs import Blobs
from conveyor.ports.clock import Clock
from conveyor.ports.coordinator import Coordinator, Signals
from conveyor.ports.queue import Queue
from conveyor.ports.store import Store
from conveyor.ports.webhook_sender import WorkflowCallback
from conveyor.usecases.run import run_progress


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsRuntime:
    store: Store
    queue: Queue
    blobs: Blobs
    coordinator: Coordinator
    signals: CrossProcessSignals
    listeners: Sequence[Child]
    is_away: Callable[[], bool]
    meter: Meter
    workflows: WorkflowCallback
    secret: SecretRow
    cache: RedisCache | None = None


@asynccontextmanager
async def open_shared(
    settings: Settings,
    *,
    clock: Clock,
    random: Random,
    owner: str,
    local: Signals,
) -> AsyncGenerator[AwsRuntime, None]:
    """Opens the engine. `local` are the signals of this process's worker, to which the `listeners`
    pass on what they receive."""
    names = names_of(settings)
    async with (
        # In this order: Redis calls are counted by the engine's meter, and both must outlive the
        # ports that use them.
        open_aws(
            names,
            clock=clock,
            random=random,
            with_sdk=settings.aws_plane == "boto",
            call_timeout_s=settings.aws_timeout_s,
            packing=Packing.of(wait_ms=settings.pack_wait_ms, concurrency=settings.concurrency),
        ) as engine,
        _open_redis(settings.redis_url, engine.meter) as link,
        open_on(settings, engine, link, random=random, owner=owner, local=local) as shared,
    ):
        yield shared


@asynccontextmanager
async def _open_redis(
    url: str | None, meter: Meter
) -> AsyncGenerator[RedisConnection | None, None]:
    if url is None:
        yield None
        return
    async with open_link(url, meter.count_redis) as link:
        yield link


@asynccontextmanager
async def open_on(
    settings: Settings,
    engine: AwsEngine,
    link: RedisConnection | None,
    *,
    random: Random,
    owner: str,
    local: Signals,
) -> AsyncGenerator[AwsRuntime, None]:
    """Builds the ports of a process over any AWS transport and any Redis connection."""
    listener = Child(
        "control_queue_listener",
        run=partial(listen_forever, engine.control_queue, local.batch_opened),
    )
    make = partial(_make_runtime, settings, engine, local)
    if link is None:
        # Without Redis, leases are rows in DynamoDB, and other processes find changes by polling.
        yield make(engine.coordinator, no_notification, [listener], lambda: False)
        return
    async with running_on(
        link, random=random, space=settings.table, owner=owner, workers_on=run_progress.WORKERS
    ) as redis:
        listen = partial(redis.channel.listen_forever, local.run_changed)
        shared = make(
            redis.coordinator,
            redis.channel.tell,
            [listener, Child("signal_listener", run=listen)],
            lambda: redis.coordinator.is_away,
        )
        yield replace(shared, cache=redis.cache)


def _make_runtime(
    settings: Settings,
    engine: AwsEngine,
    local: Signals,
    coordinator: Coordinator,
    tell: Tell,
    listeners: Sequence[Child],
    is_away: Callable[[], bool],
) -> AwsRuntime:
    return AwsRuntime(
        store=engine.store,
        queue=engine.queue,
        blobs=engine.blobs,
        coordinator=coordinator,
        signals=CrossProcessSignals(
            coordinator=coordinator,
            local=local,
            tell=tell,
            notify=engine.control_queue.batch_opened,
            can_abandon=settings.gateway_url != "direct",
        ),
        listeners=listeners,
        is_away=is_away,
        meter=engine.meter,
        workflows=engine.workflows,
        secret=engine.secret,
    )


async def create_aws_resources(
    settings: Settings, *, clock: Clock, random: Random
) -> Sequence[str]:
    """Creates the resources of the engine that do not exist. Returns the names of all of them."""
    return await create_resources(
        names_of(settings),
        clock=clock,
        random=random,
        body_days=settings.body_days,
        call_timeout_s=settings.aws_timeout_s,
    )


def names_of(settings: Settings) -> Names:
    return Names(table=settings.table, bucket=settings.bucket, queue_prefix=settings.queue_prefix)
