"""A fleet in virtual time: real workers on models of AWS and Redis, with a simulated gateway.

Each worker is assembled as `conveyor worker` assembles it; only the services, the gateway and the
clock are simulated.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TypeVar

import trio
from prometheus_client import CollectorRegistry

from actors.tree import LocalSignals, make_limiter, single_writer_mailboxes
from conveyor.bootstrap.aws import names_of, open_on
from conveyor.bootstrap.runtime import AWS, Runtime, make_env
from conveyor.bootstrap.two_stores import split, split_store
from conveyor.config import PostgresSettings, Settings
from conveyor.domain import ids
from conveyor.domain.budget import Price
from conveyor.domain.ids import CallerId, JobId
from conveyor.domain.model import Webhook
from conveyor.domain.submit.admission import TaskDraft
from conveyor.engines.aws.client.client import RetryingAwsClient
from conveyor.engines.aws.client.usage import Meter
from conveyor.engines.aws.dynamodb.keys import INDEXES
from conveyor.engines.aws.engine import build_engine, check_resources
from conveyor.engines.aws.packs import Packing
from conveyor.engines.memory import memory_engine
from conveyor.engines.system import VirtualClock
from conveyor.ports.gateway import Contact, GatewayReport, Outcome, Scraped, ScrapeRequest
from conveyor.ports.store import Store
from conveyor.ports.webhook_sender import Delivered, Message, NotDelivered, Unresolved
from conveyor.simulation.models import AwsModel, FaultRates, FaultSource, RedisModel
from conveyor.simulation.models.dynamodb.capacity import Place
from conveyor.simulation.models.fault_rates import CallFaults, CapacityLimits, DynamoFaults
from conveyor.simulation.models.redis.keyspace import Keyspace
from conveyor.simulation.models.redis.model import ModelRedisConnection
from conveyor.telemetry import make_metrics
from conveyor.usecases.context import Context, InlineExecutor
from conveyor.usecases.submit.jobs import Accepted, Submission, submit

EPOCH_S = 1_800_000_000.0
LATENCY_S = (0.002, 0.012)
# The calls that a gateway key may have in flight, per slot of the fleet: two, so that the plan of
# the gateway never limits the fleet.
PLAN_SLOTS = 2
# DynamoDB bills this many bytes of storage for each item and index entry, beside its content.
ITEM_OVERHEAD_BYTES = 100
BODY = b"<p>a page</p>" * 40
T = TypeVar("T")

LONG = "long"
LONG_HOST = f"https://{LONG}.example/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The size of a fleet and the capacity of what it uses."""

    workers: int
    slots: int
    shards: int
    table_writes: float
    think_s: float
    scaling: str | None = None
    has_redis: bool = True  # Without Redis, leases are rows of the table.
    # Tasks, their counters and events in a store of their own, which answers at once: only what AWS
    # bills is of interest here.
    has_task_store: bool = False

    @property
    def service_rates(self) -> FaultRates:
        """No faults: only the capacity of each service and its latency."""
        limits = CapacityLimits(table_writes=self.table_writes, table_reads=3 * self.table_writes)
        return FaultRates(
            calls=CallFaults(latency_s=LATENCY_S), dynamodb=DynamoFaults(capacity=limits)
        )

    @property
    def settings(self) -> Settings:
        return Settings(
            data_dir=Path("nowhere"),
            engine=AWS,
            table="conveyor",
            bucket="conveyor",
            secret_key="known to all",
            gateway_url="https://gateway.example/",
            task_shard_count=self.shards,
            concurrency=self.slots,
            scaling=self.scaling,
            redis_url="redis://modelled" if self.has_redis else None,
            # Even a part of a long list is staged and sharded, as the whole would be.
            sync_tasks_max=100,
            postgres=PostgresSettings(task_store="postgres" if self.has_task_store else "dynamodb"),
        )


@dataclass(slots=True)
class SlowGateway:
    """Returns a page after `think_s`. Pages of the long list take `think_s` on average, with an
    exponential distribution. Pages of short lists take exactly `think_s`, so any time that a short
    list needs beyond that is time it waited.

    Each key may have `calls_max` calls in flight. Every response reports that limit, as ZenRows
    does: a worker makes few calls at a time until a gateway has reported its limit."""

    think_s: float
    randomness: random.Random
    calls_max: int
    served: int = 0
    by_key: Counter[str] = field(default_factory=Counter)

    @property
    def inflight(self) -> int:
        return self.by_key.total()

    def price(self, params: Mapping[str, str]) -> Price:
        return Price()

    async def scrape(self, request: ScrapeRequest) -> Outcome:
        key = request.partition
        self.by_key[key] += 1
        is_long = request.url.startswith(LONG_HOST)
        try:
            await trio.sleep(
                self.randomness.expovariate(1 / self.think_s) if is_long else self.think_s
            )
        finally:
            remaining = self.calls_max - self.by_key[key]
            self.by_key[key] -= 1
        self.served += 1
        report = GatewayReport(
            contact=Contact.ANSWERED, limit=self.calls_max, remaining=max(0, remaining)
        )
        return Scraped(status=200, content_type="text/html", body=BODY, report=report)


@dataclass(slots=True, kw_only=True)
class MeteredRedis(RedisModel):
    """Counts the commands of the workers, as the link to a real Redis does."""

    meter: Meter = field(default_factory=Meter)

    async def ask(self, link: ModelRedisConnection, do: Callable[[Keyspace], T]) -> T:
        self.meter.count_redis("ask")
        return await RedisModel.ask(self, link, do)


class NoWebhooks:
    """A webhook sender for jobs without webhooks."""

    async def deliver(self, message: Message) -> Delivered | NotDelivered:
        raise AssertionError("no job here has a webhook")

    async def resolve(self, webhook: Webhook, partition: str) -> Unresolved | None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """A running fleet. `meter` counts the calls of the workers and of submits. The bench itself
    reads the store through `unmetered`."""

    plan: Plan
    model: AwsModel
    meter: Meter
    gateway: SlowGateway
    env: Context
    unmetered: Context

    async def submit(self, caller: str, count: int, *, max_inflight: int) -> Accepted:
        drafts = [TaskDraft(url=f"https://{caller}.example/{n}") for n in range(count)]
        submission = Submission(drafts=drafts, max_inflight=max_inflight)
        job_id = JobId(self.env.new_id())
        return await submit(self.env, CallerId(caller), submission, job_id=job_id)

    def stored_row_bytes(self) -> int:
        """Returns the bytes of all rows and index entries for which DynamoDB bills storage."""
        table = self.model.dynamodb.table(self.plan.settings.table)
        partitions = chain(
            table.partitions.values(), *(i.partitions.values() for i in table.indexes.values())
        )
        rows = [row for partition in partitions for row in partition.rows.values()]
        return sum(row.size_bytes + ITEM_OVERHEAD_BYTES for row in rows)

    def written_units(self) -> Mapping[Place, float]:
        """Returns the write units that each partition has used so far."""
        return Counter(self.model.dynamodb.capacity(self.plan.settings.table).written)


@asynccontextmanager
async def running_fleet(
    plan: Plan, seed: int, meter: Meter | None = None
) -> AsyncGenerator[Fleet, None]:
    """Runs all workers; submits go through the context of the first worker."""
    randomness, clock = random.Random(seed), VirtualClock(EPOCH_S)
    fault_source = FaultSource(random=randomness, service_rates=plan.service_rates)
    model, redis = (
        AwsModel(clock=clock, fault_source=fault_source),
        MeteredRedis(clock=clock, fault_source=fault_source),
    )
    meter = meter or Meter()
    meter.indexes = [(index.pk, index.sk) for index in INDEXES]
    redis.meter = meter
    redis.primary.kept_s = (
        0.0  # No fail-over happens, and the undo log for one would need gigabytes.
    )
    names = names_of(plan.settings)
    await check_resources(make_aws_client(model, randomness, meter), names, region="us-east-1")
    unmetered = await build_engine(
        make_aws_client(model, randomness, Meter()), model, names, clock=clock, random=randomness
    )
    gateway = SlowGateway(
        plan.think_s, randomness, calls_max=PLAN_SLOTS * plan.workers * plan.slots
    )
    tasks: Store | None = None
    unmetered_store: Store = unmetered.store
    if plan.has_task_store:
        tasks = memory_engine(clock=clock, random=randomness).store
        unmetered_store = split_store(
            unmetered.store, tasks, unmetered.queue, clock=clock, random=randomness
        )
    async with AsyncExitStack() as stack:
        worlds = [
            await stack.enter_async_context(
                open_worker(
                    plan,
                    make_aws_client(model, randomness, meter),
                    model,
                    redis,
                    gateway,
                    randomness,
                    tasks,
                )
            )
            for _ in range(plan.workers)
        ]
        nursery = await stack.enter_async_context(trio.open_nursery())
        for world in worlds:
            await nursery.start(world.worker().run)
        yield Fleet(
            plan=plan,
            model=model,
            meter=meter,
            gateway=gateway,
            env=worlds[0].env,
            unmetered=replace(worlds[0].env, store=unmetered_store),
        )
        nursery.cancel_scope.cancel()


def make_aws_client(model: AwsModel, randomness: random.Random, meter: Meter) -> RetryingAwsClient:
    """Returns a client with its own retry budget, as each process has one; all share the meter."""
    return RetryingAwsClient(transport=model, random=randomness, meter=meter)


@asynccontextmanager
async def open_worker(
    plan: Plan,
    client: RetryingAwsClient,
    model: AwsModel,
    redis: MeteredRedis,
    gateway: SlowGateway,
    randomness: random.Random,
    tasks: Store | None = None,
) -> AsyncGenerator[Runtime, None]:
    settings, clock, mail = plan.settings, VirtualClock(EPOCH_S), single_writer_mailboxes()
    packing = Packing.of(wait_ms=settings.pack_wait_ms, concurrency=settings.concurrency)
    engine = await build_engine(
        client, model, names_of(settings), clock=clock, random=randomness, packing=packing
    )
    owner = ids.mint_ulid(clock.now(), randomness)
    local = LocalSignals(mail.discovery.address, mail.streamer.address)
    link = redis.link() if plan.has_redis else None
    async with open_on(settings, engine, link, random=randomness, owner=owner, local=local) as aws:
        shared = aws if tasks is None else split(aws, tasks, clock=clock, random=randomness)
        env = make_env(settings, shared, clock, randomness, mail, InlineExecutor())
        yield Runtime(
            settings=settings,
            env=replace(env, process_id=owner, signals=shared.signals),
            mail=mail,
            gateway=gateway,
            notifier=NoWebhooks(),
            limiter=make_limiter(plan.slots, env.config.pace),
            metrics=make_metrics(CollectorRegistry()),
            listeners=shared.listeners,
        )
