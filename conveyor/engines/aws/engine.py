"""The AWS engine: every durable port on a table, a bucket and queues
(docs/operations.md, AWS resources)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass

from conveyor.domain import limits
from conveyor.domain.addresses import TargetPolicy
from conveyor.domain.errors import ConveyorError
from conveyor.domain.randomness import Random
from conveyor.engines.aws import queues
from conveyor.engines.aws.blobs import Presigner, S3Blobs
from conveyor.engines.aws.boto import open_boto_plane
from conveyor.engines.aws.buckets import make_bucket
from conveyor.engines.aws.coordinator import DynamoCoordinator
from conveyor.engines.aws.credentials import Access, find_access
from conveyor.engines.aws.doorbell import Doorbell
from conveyor.engines.aws.dynamo import DynamoStore, create_table
from conveyor.engines.aws.dynamo.layout import INDEXES
from conveyor.engines.aws.dynamo.table import Table
from conveyor.engines.aws.errors import NoAnswer
from conveyor.engines.aws.metering import Meter
from conveyor.engines.aws.plane import LeanPlane
from conveyor.engines.aws.queue import SqsQueue
from conveyor.engines.aws.seam import DEADLINE_S, CrashPoint, LayeredSeam, Plane, Seam
from conveyor.engines.aws.secret_row import SecretRow
from conveyor.engines.aws.workflows import StepFunctions
from conveyor.net.pool import HttpPool
from conveyor.net.slots import PoolLimits
from conveyor.ports.clock import Clock
from conveyor.ports.errors import QueueGone

CONNECTIONS_MAX = 512


class NotSetUp(ConveyorError):
    """What the engine needs is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What belongs to one deployment."""

    table: str
    bucket: str
    queue_prefix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsEngine:
    """`coordinator` is for where there is no Redis; `bell` calls some worker to a list; `meter` has
    counted all that was asked."""

    store: DynamoStore
    queue: SqsQueue
    blobs: S3Blobs
    coordinator: DynamoCoordinator
    bell: Doorbell
    meter: Meter
    workflows: StepFunctions
    secret: SecretRow


@asynccontextmanager
async def open_aws(
    names: Names,
    *,
    clock: Clock,
    random: Random,
    crash: CrashPoint | None = None,
    with_sdk: bool = False,
    call_timeout_s: float = DEADLINE_S,
) -> AsyncGenerator[AwsEngine, None]:
    """NotSetUp when there are no keys, or `conveyor init` was never run. `with_sdk` has aioboto3
    make the calls, at ten times and more of the lean plane's cost."""
    access = await _found_access(clock)
    meter = Meter(indexes=[(index.pk, index.sk) for index in INDEXES])
    # Endpoints are the operator's word: they may well be internal.
    pool_limits = PoolLimits(
        connections_max=2 * CONNECTIONS_MAX,
        connections_per_origin_max=CONNECTIONS_MAX,
        trusts_peers=True,
    )
    async with AsyncExitStack() as stack:
        pool = stack.enter_context(closing(HttpPool(TargetPolicy(allow_private=True), pool_limits)))
        lean = LeanPlane(access=access, pool=pool, now=clock.now, traffic=meter.traffic)
        plane: Plane = lean
        if with_sdk:
            plane = await stack.enter_async_context(open_boto_plane(access))
        seam = LayeredSeam(
            plane=plane, random=random, meter=meter, crash=crash, deadline_s=call_timeout_s
        )
        yield await engine_on(seam, lean, names, clock=clock, random=random)


async def engine_on(
    seam: LayeredSeam, presigner: Presigner, names: Names, *, clock: Clock, random: Random
) -> AwsEngine:
    """The engine over any plane. NotSetUp when `make_ready` was never run there."""
    meter = seam.meter or Meter()
    queue = SqsQueue(seam=seam, clock=clock, random=random, prefix=names.queue_prefix)
    table = Table(name=names.table, seam=seam, random=random, meter=meter)
    return AwsEngine(
        store=DynamoStore(table, queue),
        queue=queue,
        blobs=S3Blobs(
            seam=seam, presigner=presigner, clock=clock, random=random, bucket=names.bucket
        ),
        coordinator=DynamoCoordinator(seam, names.table, clock=clock, random=random),
        bell=await _find_bell(seam, names, random),
        meter=meter,
        workflows=StepFunctions(seam),
        secret=SecretRow(seam, names.table),
    )


async def set_up(
    names: Names,
    *,
    clock: Clock,
    random: Random,
    body_days: int,
    call_timeout_s: float = DEADLINE_S,
) -> Sequence[str]:
    """Makes what is not there yet, and answers what there is; to do it again is fine."""
    access = await _found_access(clock)
    async with open_boto_plane(access) as plane:
        return await make_ready(
            LayeredSeam(plane=plane, random=random, deadline_s=call_timeout_s),
            names,
            region=access.region,
            body_days=body_days,
        )


async def make_ready(
    seam: Seam, names: Names, *, region: str, body_days: int = limits.BODY_DAYS
) -> Sequence[str]:
    await create_table(seam, names.table)
    left_out = await make_bucket(seam, names.bucket, region=region, body_days=body_days)
    made = await queues.make_control_queues(seam, names.queue_prefix)
    return [
        f"table {names.table}",
        f"bucket {names.bucket}" + "".join(f" ({remark})" for remark in left_out),
        f"control queue {made.control_url}",
        f"dead queue {made.dead_url}",
    ]


async def _found_access(clock: Clock) -> Access:
    try:
        return await find_access(clock.now)
    except NoAnswer as error:
        raise NotSetUp(f"{error}: set AWS_REGION and the usual AWS credentials") from None


async def _find_bell(seam: Seam, names: Names, random: Random) -> Doorbell:
    try:
        found = await queues.find_control_queues(seam, names.queue_prefix)
    except QueueGone:
        raise NotSetUp(
            f"there is no queue {names.queue_prefix}{queues.CONTROL}: run `conveyor init` first"
        ) from None
    return Doorbell(seam=seam, random=random, control_url=found.control_url)
