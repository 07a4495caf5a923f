"""The cost of a task: calls and write units, counted by the meter. Bodies on S3 are not
included."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random

import pytest
import trio
from prometheus_client import CollectorRegistry

from actors.messages import Settle, ShardWriterMessage
from actors.runtime import Mailbox, Reply
from actors.shard_writer import ShardWriter
from conveyor.domain import limits
from conveyor.domain.ids import CallerId, JobId
from conveyor.domain.model import Result, Run, Task
from conveyor.domain.run import settlement
from conveyor.domain.run.settlement import Claimed, Cost, Settled, SettleVerdict
from conveyor.domain.submit.admission import TaskDraft
from conveyor.engines.aws.client.usage import Meter
from conveyor.engines.aws.dynamodb import DynamoStore
from conveyor.engines.aws.dynamodb.keys import INDEXES
from conveyor.engines.aws.sqs import SqsQueue
from conveyor.engines.redis import open_redis
from conveyor.ports.queue import Message
from conveyor.telemetry import make_metrics
from conveyor.usecases.context import BatchingConfig, Context
from conveyor.usecases.run import ingest, reconcile, tasks
from conveyor.usecases.run.ingest import Ingested
from conveyor.usecases.submit import jobs
from tests.actors.world import make_world
from tests.aws import a_table, an_access, an_aws_client, an_http_transport
from tests.conformance.coordinators import a_space

pytestmark = pytest.mark.slow

COUNT = 800
SHARDS = 8
RESULT = Result("jobs/1/runs/1/task.1", 20_000, "0" * 64, "text/html", 200)
PACE = BatchingConfig(settle_s=0.1, settle_max=SHARDS * limits.INLINE_TASKS_MAX)


@asynccontextmanager
async def metered_env(ministack: str, redis: str) -> AsyncGenerator[tuple[Context, Meter], None]:
    """The production engine on local servers; bodies are in memory."""
    meter = Meter(indexes=[(index.pk, index.sk) for index in INDEXES])
    env, space = make_world().env, a_space()
    async with (
        an_http_transport(an_access(dynamodb=ministack, sqs=ministack)) as transport,
        open_redis(
            redis,
            random=Random(1),
            space=space,
            owner="cost",
            workers_on="w",
            note=meter.count_redis,
        ) as shared,
    ):
        client = replace(an_aws_client(transport), meter=meter)
        queue = SqsQueue(client=client, clock=env.clock, random=Random(1), prefix=f"{space}-")
        config = replace(env.config, sync_tasks_max=100, shard_count=SHARDS, pace=PACE)
        store = DynamoStore(await a_table(client, space), queue)
        yield (
            replace(env, store=store, queue=queue, coordinator=shared.coordinator, config=config),
            meter,
        )


async def ingested(env: Context) -> Run:
    """A large job that is completely ingested."""
    drafts = [TaskDraft(url=f"https://example.com/page?id={number}") for number in range(COUNT)]
    job_id = JobId(env.new_id())
    accepted = await jobs.submit(env, CallerId("me"), jobs.Submission(drafts=drafts), job_id=job_id)
    run = accepted.run
    (batch,) = await ingest.open_batches_of(env, run.job_id, run.run_id)
    assert await reconcile.finish_batch(env, batch) is Ingested.SEALED
    return run


async def claim_all(env: Context, run: Run) -> list[tuple[Message, Task]]:
    """Acquires leases, receives and claims every task, as a poller does, in groups of fifty."""
    taken: list[tuple[Message, Task]] = []
    leases = await env.coordinator.acquire(
        run.job_id, run.run_id, count_max=50, cap=100, ttl_s=limits.LEASE_TTL_S
    )
    while len(taken) < COUNT:
        messages = await env.queue.receive(run.run_id, count_max=50, visibility_s=600)
        claims = await tasks.claim(env, [message.ref for message in messages])
        for message, claim in zip(messages, claims, strict=True):
            assert isinstance(claim, Claimed)
            taken.append((message, claim.task))
        await env.coordinator.renew(leases, ttl_s=limits.LEASE_TTL_S)
    await env.coordinator.release(leases)
    return taken


async def settle_all(env: Context, taken: list[tuple[Message, Task]], meter: Meter) -> None:
    """Settles all tasks through one writer and waits until it has acked them."""
    mailbox: Mailbox[ShardWriterMessage] = Mailbox(capacity=COUNT)
    replies: list[Reply[SettleVerdict]] = [Reply() for _ in taken]
    for (message, task), reply in zip(taken, replies, strict=True):
        change = settlement.succeed(message.ref, task, RESULT, spent=Cost(1, 280), now=env.now())
        mailbox.address.tell_nowait(Settle(message.ref, task, change, message, reply))
    writer = ShardWriter(env=env, metrics=make_metrics(CollectorRegistry()))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.run, mailbox.open_inbox())
        for reply in replies:
            await reply.wait_answered()
            assert isinstance(reply.result(), Settled)
        with trio.fail_after(60):
            while meter.calls["sqs.DeleteMessageBatch"] < len(taken) // 10:
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()


async def test_a_task_costs_at_most_two_and_a_half_calls_and_little_over_four_write_units(
    ministack: str, redis: str
) -> None:
    async with metered_env(ministack, redis) as (env, meter):
        before = Counter(meter.calls)
        taken = await claim_all(env, await ingested(env))
        await settle_all(env, taken[:-10], meter)
        calls = meter.calls - before

    assert sum(calls.values()) / COUNT <= 2.5, calls
    assert meter.write_units / COUNT <= 4.2
    assert meter.price_millionths / COUNT <= 3.0
