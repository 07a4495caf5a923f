"""The AWS engine: implements every durable port with a table, a bucket and queues
(docs/operations.md, AWS resources)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from typing import Any

from conveyor.domain import limits
from conveyor.domain.errors import ConveyorError
from conveyor.domain.ids import Random
from conveyor.domain.submit.target import TargetPolicy
from conveyor.engines.aws.client.auth import AwsAccess, find_access
from conveyor.engines.aws.client.client import (
    DEADLINE_S,
    AwsClient,
    AwsTransport,
    RefusalLog,
    RetryingAwsClient,
)
from conveyor.engines.aws.client.http_transport import HttpTransport
from conveyor.engines.aws.client.service_clock import ServiceClock
from conveyor.engines.aws.client.usage import Meter
from conveyor.engines.aws.control_queue import ControlQueue
from conveyor.engines.aws.coordinator import DynamoCoordinator
from conveyor.engines.aws.dynamodb import DynamoStore, create_table
from conveyor.engines.aws.dynamodb.keys import INDEXES
from conveyor.engines.aws.dynamodb.table import Table
from conveyor.engines.aws.errors import AwsError, NoResponse, NotAllowed
from conveyor.engines.aws.packs import DEFAULT_PACKING, Packing
from conveyor.engines.aws.s3 import Presigner, S3Blobs, make_bucket
from conveyor.engines.aws.sqs import CONTROL, SqsQueue, find_control_queues, make_control_queues
from conveyor.http_client.connection_limits import PoolLimits
from conveyor.http_client.pool import HttpPool
from conveyor.ports.clock import Clock
from conveyor.ports.errors import QueueGone, Unavailable
from conveyor.ports.secret_box import SecretBox, WrongSecret, make_check, opens_check
from conveyor.ports.webhook_sender import Callback, Delivered, NotDelivered

# Connections per service endpoint. Fewer would make calls wait; idle ones are closed by the pool.
CONNECTIONS_MAX = 512


class NotSetUp(ConveyorError):
    """Credentials, a region, or a resource of the engine is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The names of the resources of one deployment."""

    table: str
    bucket: str
    queue_prefix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsEngine:
    """`coordinator` is used if there is no Redis. `control_queue` notifies a worker of an open
    batch. `meter` counts all calls."""

    store: DynamoStore
    queue: SqsQueue
    blobs: S3Blobs
    coordinator: DynamoCoordinator
    control_queue: ControlQueue
    meter: Meter
    workflows: StepFunctions
    secret: SecretRow


@asynccontextmanager
async def open_aws(
    names: Names,
    *,
    clock: Clock,
    random: Random,
    with_sdk: bool = False,
    call_timeout_s: float = DEADLINE_S,
    packing: Packing = DEFAULT_PACKING,
) -> AsyncGenerator[AwsEngine, None]:
    """Opens the engine. Raises NotSetUp if there are no keys, or `conveyor init` was never run.

    With `with_sdk` aioboto3 makes the calls, at ten times the cost and more.
    """
    access = await _find_access(clock)
    meter = Meter(indexes=[(index.pk, index.sk) for index in INDEXES])
    # The operator chose the endpoints, so internal addresses are allowed here.
    pool_limits = PoolLimits(
        connections_max=2 * CONNECTIONS_MAX,
        connections_per_origin_max=CONNECTIONS_MAX,
        trusts_peers=True,
    )
    async with AsyncExitStack() as stack:
        pool = stack.enter_context(closing(HttpPool(TargetPolicy(allow_private=True), pool_limits)))
        service_clock = ServiceClock(clock)
        lean = HttpTransport(
            access=access,
            pool=pool,
            now=clock.now,
            traffic=meter.traffic,
            service_clock=service_clock,
        )
        transport: AwsTransport = lean
        if with_sdk:
            transport = await stack.enter_async_context(_open_sdk(access))
        client = RetryingAwsClient(
            transport=transport,
            random=random,
            meter=meter,
            refusals=RefusalLog(),
            deadline_s=call_timeout_s,
        )
        yield await build_engine(
            client,
            lean,
            names,
            clock=clock,
            random=random,
            service_clock=service_clock,
            packing=packing,
        )


async def build_engine(
    client: RetryingAwsClient,
    presigner: Presigner,
    names: Names,
    *,
    clock: Clock,
    random: Random,
    service_clock: ServiceClock | None = None,
    packing: Packing = DEFAULT_PACKING,
) -> AwsEngine:
    """Builds the engine over any transport. Raises NotSetUp if the resources do not exist."""
    meter = client.meter or Meter()
    queue = SqsQueue(client=client, clock=clock, random=random, prefix=names.queue_prefix)
    table = Table(name=names.table, client=client, random=random, meter=meter)
    return AwsEngine(
        store=DynamoStore(table, queue),
        queue=queue,
        blobs=S3Blobs(
            client=client,
            presigner=presigner,
            clock=clock,
            random=random,
            bucket=names.bucket,
            packing=packing,
        ),
        coordinator=DynamoCoordinator(
            client, names.table, clock=service_clock or clock, random=random
        ),
        control_queue=await find_control_queue(client, names, random),
        meter=meter,
        workflows=StepFunctions(client),
        secret=SecretRow(client, names.table),
    )


@asynccontextmanager
async def open_s3_blobs(
    bucket: str,
    *,
    clock: Clock,
    random: Random,
    call_timeout_s: float = DEADLINE_S,
    packing: Packing = DEFAULT_PACKING,
) -> AsyncGenerator[S3Blobs, None]:
    """Opens the bodies alone, for an engine that keeps its rows elsewhere."""
    access = await _find_access(clock)
    pool_limits = PoolLimits(
        connections_max=2 * CONNECTIONS_MAX,
        connections_per_origin_max=CONNECTIONS_MAX,
        trusts_peers=True,
    )
    with closing(HttpPool(TargetPolicy(allow_private=True), pool_limits)) as pool:
        transport = HttpTransport(access=access, pool=pool, now=clock.now)
        client = RetryingAwsClient(
            transport=transport,
            random=random,
            refusals=RefusalLog(),
            deadline_s=call_timeout_s,
        )
        yield S3Blobs(
            client=client,
            presigner=transport,
            clock=clock,
            random=random,
            bucket=bucket,
            packing=packing,
        )


async def create_s3_bucket(
    bucket: str,
    *,
    clock: Clock,
    random: Random,
    body_days: int,
    call_timeout_s: float = DEADLINE_S,
) -> str:
    """Creates the bucket if it does not exist. Returns what to show of it."""
    access = await _find_access(clock)
    async with _open_sdk(access) as transport:
        client = RetryingAwsClient(transport=transport, random=random, deadline_s=call_timeout_s)
        left_out = await make_bucket(client, bucket, region=access.region, body_days=body_days)
    return f"bucket {bucket}" + "".join(f" ({remark})" for remark in left_out)


async def create_resources(
    names: Names,
    *,
    clock: Clock,
    random: Random,
    body_days: int,
    call_timeout_s: float = DEADLINE_S,
) -> Sequence[str]:
    """Creates missing resources, and returns a list of all. The call may be repeated."""
    access = await _find_access(clock)
    async with _open_sdk(access) as transport:
        return await check_resources(
            RetryingAwsClient(transport=transport, random=random, deadline_s=call_timeout_s),
            names,
            region=access.region,
            body_days=body_days,
        )


async def check_resources(
    client: AwsClient, names: Names, *, region: str, body_days: int = limits.BODY_DAYS
) -> Sequence[str]:
    await create_table(client, names.table)
    left_out = await make_bucket(client, names.bucket, region=region, body_days=body_days)
    queues = await make_control_queues(client, names.queue_prefix)
    return [
        f"table {names.table}",
        f"bucket {names.bucket}" + "".join(f" ({remark})" for remark in left_out),
        f"control queue {queues.control_url}",
        f"dead queue {queues.dead_url}",
    ]


def _open_sdk(access: AwsAccess) -> AbstractAsyncContextManager[AwsTransport]:
    # Imported here: only `conveyor init` needs the SDK, and trio-asyncio 0.16 cannot be imported on
    # Python 3.14.
    try:
        from conveyor.engines.aws.client.boto_transport import open_boto_transport
    except AttributeError as error:
        raise NotSetUp(
            f"the SDK of AWS cannot be used on this Python ({error}): run `conveyor init` on "
            "Python 3.13 or earlier, or deploy deploy/aws/data.yaml"
        ) from error
    return open_boto_transport(access)


async def _find_access(clock: Clock) -> AwsAccess:
    try:
        return await find_access(clock.now)
    except NoResponse as error:
        raise NotSetUp(f"{error}: set AWS_REGION and the usual AWS credentials") from None


async def find_control_queue(client: AwsClient, names: Names, random: Random) -> ControlQueue:
    try:
        queues = await find_control_queues(client, names.queue_prefix)
    except QueueGone:
        raise NotSetUp(
            f"there is no queue {names.queue_prefix}{CONTROL}: run `conveyor init` first"
        ) from None
    return ControlQueue(client=client, random=random, control_url=queues.control_url)


# The secret check of the AWS engine: a row of the table that only the right secret can unseal
# (SPEC.md 5.3).


_KEY = {"pk": {"S": "SecretCheck"}, "sk": {"S": "SecretCheck"}}
_REFUSED = "ConditionalCheckFailedException"


@dataclass(frozen=True, slots=True)
class SecretRow:
    client: AwsClient
    table: str

    async def check(self, secret_box: SecretBox) -> None:
        """Raises WrongSecret if the row was sealed with another secret. The first process writes
        the row."""
        check = await self._read()
        if check is None:
            await self._write(make_check(secret_box))
            # Read again: another process may have written its row first.
            check = await self._read()
        if check is not None and not opens_check(secret_box, check):
            raise WrongSecret(
                f"the table {self.table} was sealed with another secret key: set "
                "CONVEYOR_SECRET_KEY to the one that its other processes have"
            )

    async def _read(self) -> str | None:
        params = {"TableName": self.table, "Key": _KEY, "ConsistentRead": True}
        item = (await self.client.call("dynamodb", "GetItem", params)).get("Item")
        return None if item is None else str(item["check"]["S"])

    async def _write(self, check: str) -> None:
        """Writes the row if it does not exist. Of several processes the first one wins."""
        params = {
            "TableName": self.table,
            "Item": _KEY | {"check": {"S": check}},
            "ConditionExpression": "attribute_not_exists(pk)",
        }
        try:
            await self.client.call("dynamodb", "PutItem", params)
        except AwsError as error:
            if error.code != _REFUSED:
                raise


# Step Functions: ends the task of a state machine that waits for a run (SPEC.md 4.16).


ERROR_PREFIX = "Conveyor."
# The task has ended, never existed, or does not accept this output. A retry changes nothing.
_FINAL = frozenset(
    {
        "InvalidOutput",
        "InvalidToken",
        "TaskDoesNotExist",
        "TaskTimedOut",
        "ValidationException",
    }
)


@dataclass(frozen=True, slots=True)
class StepFunctions:
    client: AwsClient

    async def call_back(self, callback: Callback) -> Delivered | NotDelivered:
        try:
            await self.client.call("stepfunctions", *_request_for(callback))
        except AwsError as error:
            why = f"step_functions:{error.code}"
            return NotDelivered(why, error.status, gone=error.code in _FINAL)
        # Before Unavailable, which is its base class: the operator sees the code of the refusal.
        except NotAllowed as error:
            return NotDelivered(f"step_functions:{error.code}", error.status)
        except Unavailable:
            return NotDelivered("transport_error:step functions")
        return Delivered(200)


def _request_for(callback: Callback) -> tuple[str, dict[str, Any]]:
    if callback.is_success:
        return "SendTaskSuccess", {"taskToken": callback.token, "output": callback.payload}
    # A state machine can catch an error by its name, such as Conveyor.run.stopped.
    error = ERROR_PREFIX + callback.event_type
    return "SendTaskFailure", {
        "taskToken": callback.token,
        "error": error,
        "cause": callback.payload,
    }
