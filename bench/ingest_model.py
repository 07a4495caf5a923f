"""Measures the ingest rate of the AWS engine in virtual time, on a model with DynamoDB's limits.

A partition accepts 1,000 write units a second, and a new (cold) table 4,000; both start with the
units of one second in reserve. A call takes 2 to 6 ms. The models of SQS and S3 have no limits.
"""

from __future__ import annotations

from random import Random

import msgspec
import trio
import trio.testing

from conveyor.domain import limits
from conveyor.domain.changes import RunKey
from conveyor.domain.ids import CallerId, JobId, RunId
from conveyor.domain.submit.admission import TaskDraft
from conveyor.engines.aws.client.client import RetryingAwsClient
from conveyor.engines.aws.client.usage import Meter
from conveyor.engines.aws.engine import Names, build_engine, check_resources
from conveyor.engines.system import AesSecretBox, VirtualClock
from conveyor.ports.coordinator import TeardownResult
from conveyor.simulation.models.aws import AwsModel
from conveyor.simulation.models.fault_rates import (
    CALM,
    CallFaults,
    CapacityLimits,
    DynamoFaults,
    FaultRates,
)
from conveyor.simulation.models.fault_source import FaultSource
from conveyor.usecases.context import Context, RuntimeConfig
from conveyor.usecases.run import ingest, reconcile
from conveyor.usecases.submit import jobs

SHARD_COUNTS = (1, 4, 8, 16)
NAMES = Names(table="bench", bucket="bench", queue_prefix="bench-")
LIMITS = FaultRates(
    calls=CallFaults(latency_s=(0.002, 0.006)), dynamodb=DynamoFaults(capacity=CapacityLimits())
)


class Modelled(msgspec.Struct, frozen=True):
    """`rows_per_s` is the rate of the second half in virtual time, after the reserve of the first
    second is used up. `throttled` counts the writes that were throttled."""

    shards: int
    tasks: int
    rows_per_s: float
    throttled: int


class Progress:
    """Signals without receivers: records when each chunk was ingested."""

    def __init__(self) -> None:
        self.at: list[float] = []

    async def run_changed(self, job_id: JobId, run_id: RunId, tasks: int = 0) -> None:
        self.at.append(trio.current_time())

    async def batch_opened(self, job_id: JobId, run_id: RunId) -> None: ...

    async def teardown(self, job_id: JobId, run_id: RunId, *, deadline_s: float) -> TeardownResult:
        return TeardownResult()


def ingest_modelled(shards: int, count: int) -> Modelled:
    return trio.run(_ingest, shards, count, clock=trio.testing.MockClock(autojump_threshold=0))


async def _ingest(shards: int, count: int) -> Modelled:
    assert count % limits.CHUNK_TASKS == 0, "the count is not a multiple of a chunk"
    random, clock, progress = Random(shards), VirtualClock(1_700_000_000.0), Progress()
    fault_source = FaultSource(random=random, service_rates=CALM)
    model = AwsModel(clock=clock, fault_source=fault_source)
    client = RetryingAwsClient(transport=model, random=random, meter=Meter())
    await check_resources(client, NAMES, region="eu-west-1")
    engine = await build_engine(client, model, NAMES, clock=clock, random=random)
    env = Context(
        store=engine.store,
        queue=engine.queue,
        blobs=engine.blobs,
        coordinator=engine.coordinator,
        clock=clock,
        secret_box=AesSecretBox(b"s" * 32),
        signals=progress,
        random=random,
        process_id="bench",
        config=RuntimeConfig(sync_tasks_max=1, shard_count=shards),
    )
    drafts = [TaskDraft(url=f"https://example.com/{number}") for number in range(count)]
    submission = jobs.Submission(drafts=drafts)
    accepted = await jobs.submit(env, CallerId("bench"), submission, job_id=JobId(env.new_id()))
    fault_source.service_rates = LIMITS
    progress.at.clear()
    (batch,) = await ingest.open_batches_of(env, accepted.job.job_id, accepted.run.run_id)
    await reconcile.finish_batch(env, batch)
    half = len(progress.at) // 2
    seconds = progress.at[-1] - progress.at[half - 1]
    run = await env.store.read(RunKey(accepted.job.job_id, accepted.run.run_id))
    assert run is not None
    assert run.total == count, f"{run.total} of {count} lines"
    rows = (len(progress.at) - half) * limits.CHUNK_TASKS
    return Modelled(shards, count, rows / seconds, fault_source.fault_counts["dynamodb.throttled"])
