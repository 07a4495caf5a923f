"""A fleet in virtual time: real workers on modelled AWS and Redis, and pages that take their time.

Every worker is put together as `conveyor worker` is; only the services, the gateway and the clock
are not real.
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
from conveyor.config import Settings
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
from conveyor.engines.system import VirtualClock
from conveyor.ports.gateway import Contact, GatewayReport, Outcome, Scraped, ScrapeRequest
from conveyor.ports.webhook_sender import Delivered, Message, NotDelivered, Unresolved
from conveyor.simulation.models import AwsModel, FaultRates, FaultSource, RedisModel
from conveyor.simulation.models.dynamodb.capacity import Place
from conveyor.simulation.models.fault_rates import CallFaults, CapacityLimits, DynamoFaults
from conveyor.simulation.models.redis.keyspace import Keyspace
from conveyor.simulation.models.redis.model import ModelledLink
from conveyor.telemetry import make_metrics
from conveyor.usecases.context import Context, InlineExecutor
from conveyor.usecases.submit.jobs import Accepted, Submission, submit

EPOCH_S = 1_800_000_000.0
LATENCY_S = (0.002, 0.012)
# Calls that a key may have under way, for each slot: the plan at the gateway is not the limit here.
PLAN_SLOTS = 2
# What DynamoDB adds to each item, and to each entry of an index, when it bills storage.
ITEM_OVERHEAD_BYTES = 100
BODY = b"<p>a page</p>" * 40
T = TypeVar("T")

LONG = "long"
LONG_HOST = f"https://{LONG}.example/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a fleet consists of, and what it stands on."""

    workers: int
    slots: int
    shards: int
    table_writes: float
    think_s: float
    scaling: str | None = None
    has_redis: bool = True  # Without one, leases are rows of the table.

    @property
    def pessimism(self) -> FaultRates:
        """No faults: what a service can take in a second, and how long it takes to answer."""
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
            sync_tasks_max=100,  # A part of a long list is treated as one: staged, and in shards.
        )


@dataclass(slots=True)
class SlowGateway:
    """Pages of the long list take as long as pages do: `think_s` on average, a few of them far
    longer. Those of short lists take just as long: whatever is more, they have waited.

    Each key may have `calls_max` calls under way, and every answer says so, as ZenRows does: the
    workers keep to a small number of calls until a gateway has told them."""

    think_s: float
    draw: random.Random
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
            await trio.sleep(self.draw.expovariate(1 / self.think_s) if is_long else self.think_s)
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
    """Counts what is asked of it, as the link to a real one does."""

    meter: Meter = field(default_factory=Meter)

    async def ask(self, link: ModelledLink, do: Callable[[Keyspace], T]) -> T:
        self.meter.count_redis("ask")
        return await RedisModel.ask(self, link, do)


class NobodyToTell:
    async def deliver(self, message: Message) -> Delivered | NotDelivered:
        raise AssertionError("no job here has a webhook")

    async def resolve(self, webhook: Webhook, partition: str) -> Unresolved | None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """`meter` counts what workers and submits ask for; `watch` is how callers see what became of
    it, and is not on the bill."""

    plan: Plan
    model: AwsModel
    meter: Meter
    gateway: SlowGateway
    env: Context
    watch: Context

    async def submit(self, caller: str, count: int, *, max_inflight: int) -> Accepted:
        drafts = [TaskDraft(url=f"https://{caller}.example/{n}") for n in range(count)]
        submission = Submission(drafts=drafts, max_inflight=max_inflight)
        job_id = JobId(self.env.new_id())
        return await submit(self.env, CallerId(caller), submission, job_id=job_id)

    def stored_row_bytes(self) -> int:
        """Bytes that DynamoDB bills for the storage of all rows and their entries in indexes."""
        table = self.model.dynamodb.table(self.plan.settings.table)
        partitions = chain(
            table.partitions.values(), *(i.partitions.values() for i in table.indexes.values())
        )
        rows = [row for partition in partitions for row in partition.rows.values()]
        return sum(row.size_bytes + ITEM_OVERHEAD_BYTES for row in rows)

    def written_units(self) -> Mapping[Place, float]:
        """Write units by partition, so far."""
        return Counter(self.model.dynamodb.capacity(self.plan.settings.table).written)


@asynccontextmanager
async def a_fleet(plan: Plan, seed: int, meter: Meter | None = None) -> AsyncGenerator[Fleet, None]:
    """Everybody at work; callers go through the process of the first worker."""
    draw, clock = random.Random(seed), VirtualClock(EPOCH_S)
    fault_source = FaultSource(random=draw, pessimism=plan.pessimism)
    model, redis = (
        AwsModel(clock=clock, fault_source=fault_source),
        MeteredRedis(clock=clock, fault_source=fault_source),
    )
    meter = meter or Meter()
    meter.indexes = [(index.pk, index.sk) for index in INDEXES]
    redis.meter = meter
    redis.primary.kept_s = 0.0  # It never fails over here: what it could take back fills gigabytes.
    names = names_of(plan.settings)
    await check_resources(an_aws_client(model, draw, meter), names, region="us-east-1")
    watch = await build_engine(
        an_aws_client(model, draw, Meter()), model, names, clock=clock, random=draw
    )
    gateway = SlowGateway(plan.think_s, draw, calls_max=PLAN_SLOTS * plan.workers * plan.slots)
    async with AsyncExitStack() as stack:
        worlds = [
            await stack.enter_async_context(
                a_worker(plan, an_aws_client(model, draw, meter), model, redis, gateway, draw)
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
            watch=replace(worlds[0].env, store=watch.store),
        )
        nursery.cancel_scope.cancel()


def an_aws_client(model: AwsModel, draw: random.Random, meter: Meter) -> RetryingAwsClient:
    """Every process has a retry budget of its own; what all of them pay is one bill."""
    return RetryingAwsClient(transport=model, random=draw, meter=meter)


@asynccontextmanager
async def a_worker(
    plan: Plan,
    client: RetryingAwsClient,
    model: AwsModel,
    redis: MeteredRedis,
    gateway: SlowGateway,
    draw: random.Random,
) -> AsyncGenerator[Runtime, None]:
    settings, clock, mail = plan.settings, VirtualClock(EPOCH_S), single_writer_mailboxes()
    packing = Packing.of(wait_ms=settings.pack_wait_ms, concurrency=settings.concurrency)
    engine = await build_engine(
        client, model, names_of(settings), clock=clock, random=draw, packing=packing
    )
    owner = ids.mint_ulid(clock.now(), draw)
    local = LocalSignals(mail.discovery.address, mail.streamer.address)
    link = redis.link() if plan.has_redis else None
    async with open_on(settings, engine, link, random=draw, owner=owner, local=local) as shared:
        env = make_env(settings, shared, clock, draw, mail, InlineExecutor())
        yield Runtime(
            settings=settings,
            env=replace(env, process_id=owner, signals=shared.signals),
            mail=mail,
            gateway=gateway,
            notifier=NobodyToTell(),
            limiter=make_limiter(plan.slots, env.config.pace),
            metrics=make_metrics(CollectorRegistry()),
            listeners=shared.listeners,
        )
