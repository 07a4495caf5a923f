"""The AWS client: every call to AWS is one function, `call(service, operation, params)`
(docs/engines.md, AWS client).

The problem: retries in several layers multiply, and each service reports errors in its own way. So
this module is the only layer that has deadlines, retries and metering. Below it is a transport,
which makes exactly one attempt: `HttpTransport` for data, `BotoTransport` for the other operations
and as the reference. The simulator replaces the transport by models of the services, so the code of
the engine runs there unchanged (decision 0021). Tests wrap the transport to inject faults.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, TypeVar

import trio

from conveyor.domain import limits, timing
from conveyor.domain.ids import Random
from conveyor.engines.aws.client.usage import Meter
from conveyor.engines.aws.errors import (
    AwsError,
    NoResponse,
    describe,
    is_billed,
    is_lost,
    is_refused_for_now,
    needs_operator,
    permission_for,
    raise_translated,
)

log = logging.getLogger(__name__)

# Retries: which calls are retried, and when. One layer, with jitter, under a budget of the process.
#
# A call that the service refused for now was not applied, and may be retried. A call without an
# answer may have been applied. It is retried only if applying it twice equals applying it once.


# The first attempt and four retries.
ATTEMPTS_MAX = 5
# The ceilings of the random wait: the first, and the largest. Shorter waits repeat a throttle,
# longer ones use up the deadline.
BACKOFF_S = 0.05
BACKOFF_S_MAX = 5.0
# A full budget pays for 100 retries in a row, or for 50 after lost answers. Then each retry needs 5
# or 10 successes first, so that retries add at most a fifth to the load of a struggling service.
BUDGET_MAX = 500.0
RETRY_COST = 5.0
# A lost answer usually took a timeout, and hints at an outage rather than at a throttle.
LOST_COST = 10.0
REFUND = 1.0

# ReceiveMessage is missing on purpose: a lost call has hidden messages, and a retry hides more.
_REPEATABLE = frozenset(
    {
        "AbortMultipartUpload",
        "BatchGetItem",
        "BatchWriteItem",
        "ChangeMessageVisibility",
        "ChangeMessageVisibilityBatch",
        "CreateQueue",
        "DeleteMessage",
        "DeleteMessageBatch",
        "DeleteObject",
        "DeleteObjects",
        "DeleteQueue",
        "GetItem",
        "GetObject",
        "GetQueueAttributes",
        "GetQueueUrl",
        "HeadObject",
        "ListObjectsV2",
        "ListQueues",
        "Query",
        "Scan",
        "SendMessage",  # A retry may duplicate the message, but SQS delivers at least once anyway.
        "SendMessageBatch",
        "TransactGetItems",
        "UploadPart",
    }
)
# With a condition, the second try would fail on what the first one wrote, and report a refusal for
# a write that was applied.
_REPEATABLE_UNLESS = {
    "PutItem": ("ConditionExpression",),
    "DeleteItem": ("ConditionExpression",),
    "PutObject": ("IfMatch", "IfNoneMatch"),
    "CopyObject": ("IfMatch", "IfNoneMatch"),
}


def is_repeatable(operation: str, params: Mapping[str, Any]) -> bool:
    """Returns whether applying the call twice equals applying it once."""
    if operation == "TransactWriteItems":
        return "ClientRequestToken" in params
    unless = _REPEATABLE_UNLESS.get(operation)
    if unless is not None:
        return not any(name in params for name in unless)
    return operation in _REPEATABLE


@dataclass(slots=True)
class RetryBudget:
    """Retries take from the budget, and successes return to it. While nearly all calls fail, no
    call is retried."""

    left: float = BUDGET_MAX

    def take(self, cost: float) -> bool:
        if self.left < cost:
            return False
        self.left -= cost
        return True

    def refund(self) -> None:
        self.left = min(BUDGET_MAX, self.left + REFUND)


def retry_cost(
    error: AwsError | NoResponse, operation: str, params: Mapping[str, Any]
) -> float | None:
    """Returns the cost of a retry, or None if a retry is not safe or cannot help.

    A body that is an iterator was consumed by the first attempt, so it cannot be sent again.
    """
    if is_lost(error):
        body = params.get("Body", b"")
        can = is_repeatable(operation, params) and isinstance(body, bytes)
        return LOST_COST if can else None
    if isinstance(error, NoResponse) or is_refused_for_now(error):
        return RETRY_COST if isinstance(params.get("Body", b""), bytes) else None
    return None


def backoff_s(attempt: int, random: Random) -> float:
    """Returns a random wait between 0 and the ceiling ("full jitter").

    Calls that were throttled together are spread out the most this way.
    """
    ceiling = timing.backoff_s(attempt, first_s=BACKOFF_S, delay_s_max=BACKOFF_S_MAX)
    return random.uniform(0.0, ceiling)


# DynamoDB and SQS answer within milliseconds. Ten seconds are enough for four retries. A longer
# deadline keeps callers waiting through an outage.
DEADLINE_S = float(limits.AWS_TIMEOUT_S)
# A call of S3 may carry a body of many megabytes.
S3_DEADLINE_S = 60.0
# A streamed body moves as fast as its reader reads it.
TRANSFER_DEADLINE_S = 3600.0

T = TypeVar("T")
Params = Mapping[str, Any]
Answer = dict[str, Any]


class AwsClient(Protocol):
    """Parameters and answers are botocore's, without ResponseMetadata. DynamoDB's binary values
    are bytes. PutObject and UploadPart take `Body` as bytes, or as an async iterator with
    `ContentLength`. An iterator can be sent only once, so such a call is not retried; the caller
    closes the iterator.

    Laws:
    - An answer means that the call was applied. AwsError means that it was refused and did nothing.
      NotApplied means the same for a temporary refusal. Any other Unavailable means unknown.
    - A call ends within its deadline, including all attempts.
    - QueueGone, BlobMissing and StorageFull are raised for the conditions that they name.
    """

    async def call(
        self, service: str, operation: str, params: Params, *, attempts_max: int = ATTEMPTS_MAX
    ) -> Answer:
        """Returns the whole answer. The `Body` of GetObject is bytes. A caller that adapts its own
        rate to throttles passes `attempts_max=1`."""

    def open(
        self, service: str, operation: str, params: Params
    ) -> AbstractAsyncContextManager[Answer]:
        """The answer with `Body` as an async iterator of bytes, valid only inside the context."""


class AwsTransport(Protocol):
    """Makes one attempt. Raises only AwsError and NoResponse."""

    async def call(
        self, service: str, operation: str, params: Params, *, deadline_s: float
    ) -> Answer: ...

    def open(
        self, service: str, operation: str, params: Params, *, deadline_s: float
    ) -> AbstractAsyncContextManager[Answer]: ...


# An operator needs the cause, and not one line for each refused call.
REFUSAL_LOGGED_S = 60.0


@dataclass(slots=True)
class RefusalLog:
    """Logs each cause that needs an operator, such as a missing permission, once a minute.

    The caller of a refused call may wait and retry, or go on without the call. This is the one
    place that every refusal passes.
    """

    _quiet_until: dict[tuple[str, str, str], float] = field(default_factory=dict)

    def note(self, call: str, error: AwsError) -> None:
        # Without the message, which contains the names of objects.
        key = (call, error.code, permission_for(call, str(error)))
        now = trio.current_time()
        if now < self._quiet_until.get(key, now):
            return
        self._quiet_until[key] = now + REFUSAL_LOGGED_S
        cause = describe(error, call)
        log.error("AWS refuses a call until an operator acts", extra={"cause": cause})


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryingAwsClient:
    """The client over a transport. All clients of a process share `budget` and `meter`.

    `deadline_s` is the time of a call, including all attempts. Calls of S3 have at least
    `S3_DEADLINE_S`. Without `refusals` the caller reports refusals itself.
    """

    transport: AwsTransport
    random: Random
    budget: RetryBudget = field(default_factory=RetryBudget)
    meter: Meter | None = None
    refusals: RefusalLog | None = None
    deadline_s: float = DEADLINE_S

    async def call(
        self, service: str, operation: str, params: Params, *, attempts_max: int = ATTEMPTS_MAX
    ) -> Answer:
        ends_at = trio.current_time() + self._deadline_s_of(service, params)
        return await self._persist(self._attempt, ends_at, service, operation, params, attempts_max)

    @asynccontextmanager
    async def open(
        self, service: str, operation: str, params: Params
    ) -> AsyncGenerator[Answer, None]:
        ends_at = trio.current_time() + TRANSFER_DEADLINE_S
        opened, answer = await self._persist(self._open, ends_at, service, operation, params)
        try:
            yield answer
        except NoResponse as error:
            # The stream broke while the caller read it. The caller has already used a part of the
            # body, so this layer cannot retry.
            await _leave(opened, error)
            raise_translated(error, f"{service}.{operation}")
        except BaseException as error:
            await _leave(opened, error)
            raise
        else:
            await opened.__aexit__(None, None, None)

    async def _persist(
        self,
        attempt: Callable[[float, str, str, Params], Awaitable[T]],
        ends_at: float,
        service: str,
        operation: str,
        params: Params,
        attempts_max: int = ATTEMPTS_MAX,
    ) -> T:
        # `was_lost` remembers whether any attempt may have been applied: one lost attempt makes the
        # outcome of the whole call unknown, even if a later attempt is refused.
        number, was_lost = 0, False
        while True:
            try:
                answer = await attempt(ends_at, service, operation, params)
            except (AwsError, NoResponse) as error:
                number, was_lost = number + 1, was_lost or is_lost(error)
                wait_s = backoff_s(number, self.random)
                cost = retry_cost(error, operation, params)
                is_late = trio.current_time() + wait_s >= ends_at
                # The budget is asked last, because asking takes from it.
                if cost is None or is_late or number >= attempts_max or not self.budget.take(cost):
                    self._raise(error, f"{service}.{operation}", was_lost=was_lost)
            else:
                self.budget.refund()
                return answer
            if self.meter is not None:
                self.meter.retries[f"{service}.{operation}"] += 1
            await trio.sleep(wait_s)

    def _raise(self, error: AwsError | NoResponse, call: str, *, was_lost: bool) -> NoReturn:
        if self.refusals is not None and isinstance(error, AwsError) and needs_operator(error):
            self.refusals.note(call, error)
        raise_translated(error, call, was_lost=was_lost)

    async def _attempt(
        self, ends_at: float, service: str, operation: str, params: Params
    ) -> Answer:
        left_s = ends_at - trio.current_time()
        try:
            answer = await self.transport.call(service, operation, params, deadline_s=left_s)
        except (AwsError, NoResponse) as error:
            self._count_failure(service, operation, params, error)
            raise
        if self.meter is not None:
            self.meter.count(service, operation, params, answer)
        return answer

    async def _open(
        self, ends_at: float, service: str, operation: str, params: Params
    ) -> tuple[AbstractAsyncContextManager[Answer], Answer]:
        left_s = ends_at - trio.current_time()
        opened = self.transport.open(service, operation, params, deadline_s=left_s)
        try:
            answer = await opened.__aenter__()
        except (AwsError, NoResponse) as error:
            self._count_failure(service, operation, params, error)
            raise
        if self.meter is not None:
            self.meter.count(service, operation, params, answer)
        return opened, answer

    def _deadline_s_of(self, service: str, params: Params) -> float:
        """Returns the deadline of a call. The wait of a long poll is added to it."""
        if service == "s3":
            return max(S3_DEADLINE_S, self.deadline_s)
        return self.deadline_s + float(params.get("WaitTimeSeconds", 0))

    def _count_failure(
        self, service: str, operation: str, params: Params, error: AwsError | NoResponse
    ) -> None:
        if self.meter is not None:
            self.meter.count_failure(service, operation, params, is_billed=is_billed(error))


async def _leave(opened: AbstractAsyncContextManager[Answer], error: BaseException) -> None:
    """Leaves the transport's context with `error`. Errors that this causes are suppressed, because
    the caller raises `error` itself."""
    with suppress(AwsError, NoResponse):
        await opened.__aexit__(type(error), error, error.__traceback__)
