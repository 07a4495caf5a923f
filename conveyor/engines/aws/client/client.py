"""The seam: everything that acts through AWS is one `call(service, operation, params)`
(docs/engines.md, AWS client).

Deadlines, retries, metering, injected faults and the crash switch live here, once. Behind it is a
plane, which makes one attempt: the lean one for data, aioboto3 for the rest and as reference.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import trio

from conveyor.domain import limits
from conveyor.domain.randomness import Random
from conveyor.engines.aws.client.retry import ATTEMPTS_MAX, RetryBudget, backoff_s, retry_cost
from conveyor.engines.aws.client.usage import Meter
from conveyor.engines.aws.errors import AwsError, NoResponse, is_billed, is_lost, raise_translated

# A call of DynamoDB or SQS answers within milliseconds; ten seconds leave room for four retries.
DEADLINE_S = float(limits.AWS_TIMEOUT_S)
S3_DEADLINE_S = 60.0
TRANSFER_DEADLINE_S = 3600.0

T = TypeVar("T")
Params = Mapping[str, Any]
Answer = dict[str, Any]


class AwsClient(Protocol):
    """Parameters and answers are botocore's, without ResponseMetadata. DynamoDB's binary values
    are bytes. PutObject and UploadPart take `Body` as bytes, or as an async iterator beside
    `ContentLength`, which is sent once only; whoever made the iterator closes it.

    Laws:
    - An answer means applied; AwsError means refused, nothing done; so does NotApplied, which is
      refused for now; any other Unavailable means unknown.
    - A call ends within its deadline, all its attempts included.
    - QueueGone, BlobMissing and StorageFull are raised for what they say.
    """

    async def call(
        self, service: str, operation: str, params: Params, *, attempts_max: int = ATTEMPTS_MAX
    ) -> Answer:
        """The whole answer; GetObject's `Body` is bytes. Who paces himself by what is refused asks
        for one attempt."""

    def open(
        self, service: str, operation: str, params: Params
    ) -> AbstractAsyncContextManager[Answer]:
        """The answer with `Body` as an async iterator of bytes, good inside the context only."""


class AwsTransport(Protocol):
    """One attempt. Raises AwsError and AskTimedOut, nothing else."""

    async def call(
        self, service: str, operation: str, params: Params, *, deadline_s: float
    ) -> Answer: ...

    def open(
        self, service: str, operation: str, params: Params, *, deadline_s: float
    ) -> AbstractAsyncContextManager[Answer]: ...


class Faults(Protocol):
    """May wait, and raise AwsError or AskTimedOut in place of the service."""

    async def before(self, service: str, operation: str, params: Params) -> None:
        """Nothing is done yet."""

    async def after(self, service: str, operation: str, params: Params) -> None:
        """All is done, and nobody has heard of it."""


class CrashPoint(Protocol):
    def passes(self, call: str, side: str) -> None:
        """Ends the process when this is the call, and the side of its effect, to end at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryingAwsClient:
    """The seam over a plane. `budget` and `meter` are shared by all seams of a process.

    `deadline_s` is the time that a call has, all its attempts included; calls of S3 have at least
    `S3_DEADLINE_S`.
    """

    transport: AwsTransport
    random: Random
    budget: RetryBudget = field(default_factory=RetryBudget)
    meter: Meter | None = None
    faults: Faults | None = None
    crash: CrashPoint | None = None
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
        number, was_lost = 0, False
        while True:
            try:
                answer = await attempt(ends_at, service, operation, params)
            except (AwsError, NoResponse) as error:
                number, was_lost = number + 1, was_lost or is_lost(error)
                wait_s = backoff_s(number, self.random)
                cost = retry_cost(error, operation, params)
                is_late = trio.current_time() + wait_s >= ends_at
                if cost is None or is_late or number >= attempts_max or not self.budget.take(cost):
                    raise_translated(error, f"{service}.{operation}", was_lost=was_lost)
            else:
                self.budget.refund()
                return answer
            if self.meter is not None:
                self.meter.retries[f"{service}.{operation}"] += 1
            await trio.sleep(wait_s)

    async def _attempt(
        self, ends_at: float, service: str, operation: str, params: Params
    ) -> Answer:
        await self._before(ends_at, service, operation, params)
        left_s = ends_at - trio.current_time()
        try:
            answer = await self.transport.call(service, operation, params, deadline_s=left_s)
        except (AwsError, NoResponse) as error:
            self._count_failure(service, operation, params, error)
            raise
        await self._after(ends_at, service, operation, params, answer)
        return answer

    async def _open(
        self, ends_at: float, service: str, operation: str, params: Params
    ) -> tuple[AbstractAsyncContextManager[Answer], Answer]:
        await self._before(ends_at, service, operation, params)
        left_s = ends_at - trio.current_time()
        opened = self.transport.open(service, operation, params, deadline_s=left_s)
        try:
            answer = await opened.__aenter__()
        except (AwsError, NoResponse) as error:
            self._count_failure(service, operation, params, error)
            raise
        try:
            await self._after(ends_at, service, operation, params, answer)
        except BaseException as error:
            await _leave(opened, error)
            raise
        return opened, answer

    async def _before(self, ends_at: float, service: str, operation: str, params: Params) -> None:
        if self.crash is not None:
            self.crash.passes(f"{service}.{operation}", "before")
        if self.faults is not None:
            with _until(ends_at, was_sent=False):
                await self.faults.before(service, operation, params)

    async def _after(
        self, ends_at: float, service: str, operation: str, params: Params, answer: Answer
    ) -> None:
        if self.meter is not None:
            self.meter.count(service, operation, params, answer)
        if self.faults is not None:
            with _until(ends_at, was_sent=True):
                await self.faults.after(service, operation, params)
        if self.crash is not None:
            self.crash.passes(f"{service}.{operation}", "after")

    def _deadline_s_of(self, service: str, params: Params) -> float:
        """A long poll has its wait on top."""
        if service == "s3":
            return max(S3_DEADLINE_S, self.deadline_s)
        return self.deadline_s + float(params.get("WaitTimeSeconds", 0))

    def _count_failure(
        self, service: str, operation: str, params: Params, error: AwsError | NoResponse
    ) -> None:
        if self.meter is not None:
            self.meter.count_failure(service, operation, params, is_billed=is_billed(error))


@contextmanager
def _until(ends_at: float, *, was_sent: bool) -> Iterator[None]:
    """An injected delay is bounded by the deadline, as a real one is."""
    with trio.CancelScope(deadline=ends_at) as scope:
        yield
    if scope.cancelled_caught:
        raise NoResponse("no answer before the deadline", was_sent=was_sent)


async def _leave(opened: AbstractAsyncContextManager[Answer], error: BaseException) -> None:
    """Leave the plane's context on our way out; what it makes of the error is not our matter."""
    with suppress(AwsError, NoResponse):
        await opened.__aexit__(type(error), error, error.__traceback__)
