"""The AWS client around a transport: bounded retries, three kinds of outcome, and injected
faults."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from conveyor.engines.aws.client.client import (
    ATTEMPTS_MAX,
    BACKOFF_S_MAX,
    REFUSAL_LOGGED_S,
    RefusalLog,
    RetryBudget,
    RetryingAwsClient,
)
from conveyor.engines.aws.errors import AwsError, NoResponse, NotAllowed, NotApplied
from conveyor.ports.errors import BlobMissing, QueueGone, StorageFull, Unavailable
from tests.aws import an_aws_client
from tests.engines.aws.scripted import LOST, THROTTLED, UNSENT, ScriptedAnswer, ScriptedTransport

PUT = {"TableName": "t", "Item": {"pk": {"S": "a"}}}
GUARDED = {**PUT, "ConditionExpression": "attribute_not_exists(pk)"}
ONCE: dict[str, Any] = {"TransactItems": []}


@pytest.mark.parametrize("failure", [THROTTLED, UNSENT], ids=["throttled", "unsent"])
async def test_a_call_that_was_not_executed_is_repeated(
    failure: AwsError | NoResponse, autojump_clock: MockClock
) -> None:
    transport = ScriptedTransport(failure, failure, {"done": True})

    answer = await an_aws_client(transport).call("dynamodb", "PutItem", GUARDED)

    assert answer == {"done": True}
    assert len(transport.asked) == 3


@pytest.mark.parametrize(
    ("operation", "params", "attempts"),
    [
        ("PutItem", PUT, ATTEMPTS_MAX),
        ("PutItem", GUARDED, 1),
        ("UpdateItem", {"Key": {}}, 1),
        ("TransactWriteItems", ONCE, 1),
        ("TransactWriteItems", {**ONCE, "ClientRequestToken": "t"}, ATTEMPTS_MAX),
        ("GetItem", {}, ATTEMPTS_MAX),
        ("ReceiveMessage", {}, 1),
        ("PutObject", {"Body": b""}, ATTEMPTS_MAX),
        ("PutObject", {"Body": b"", "IfNoneMatch": "*"}, 1),
        ("PutObject", {"Body": iter(())}, 1),
    ],
)
async def test_a_call_with_a_lost_answer_is_repeated_only_if_it_is_idempotent(
    operation: str, params: Mapping[str, Any], attempts: int, autojump_clock: MockClock
) -> None:
    transport = ScriptedTransport(LOST)

    with pytest.raises(Unavailable):
        await an_aws_client(transport).call("any", operation, params)

    assert len(transport.asked) == attempts


@pytest.mark.parametrize(
    ("lines", "is_certain"),
    [([THROTTLED], True), ([UNSENT], True), ([THROTTLED, LOST, THROTTLED], False), ([LOST], False)],
)
async def test_a_call_whose_every_attempt_was_rejected_has_certainly_done_nothing(
    lines: list[ScriptedAnswer], is_certain: bool, autojump_clock: MockClock
) -> None:
    with pytest.raises(Unavailable) as caught:
        await an_aws_client(ScriptedTransport(*lines)).call("dynamodb", "PutItem", PUT)

    assert isinstance(caught.value, NotApplied) == is_certain


async def test_repeated_failures_use_up_the_retry_budget_and_retries_stop(
    autojump_clock: MockClock,
) -> None:
    transport, budget = ScriptedTransport(THROTTLED), RetryBudget(left=50.0)
    client = RetryingAwsClient(transport=transport, random=Random(1), budget=budget)

    for _ in range(100):
        with pytest.raises(Unavailable):
            await client.call("dynamodb", "GetItem", {})

    assert len(transport.asked) == 100 + 10


async def test_a_service_that_recovers_refills_the_retry_budget(autojump_clock: MockClock) -> None:
    client = RetryingAwsClient(
        transport=ScriptedTransport({}), random=Random(1), budget=RetryBudget(left=0.0)
    )

    for _ in range(7):
        await client.call("dynamodb", "GetItem", {})

    assert client.budget.left == 7.0


async def test_a_call_ends_within_its_deadline_after_any_number_of_attempts(
    autojump_clock: MockClock,
) -> None:
    class Slow(ScriptedTransport):
        async def call(
            self, service: str, operation: str, params: Mapping[str, Any], *, deadline_s: float
        ) -> dict[str, Any]:
            await trio.sleep(min(deadline_s, 4.0))
            raise THROTTLED

    started_at = trio.current_time()
    with pytest.raises(Unavailable):
        await an_aws_client(Slow({}), deadline_s=7.0).call("dynamodb", "GetItem", {})

    assert trio.current_time() - started_at <= 7.0


@pytest.mark.parametrize(
    ("said", "raised"),
    [
        (AwsError("QueueDoesNotExist", ""), QueueGone),
        (AwsError("NoSuchKey", "", status=404), BlobMissing),
        (AwsError("InsufficientStorage", "", status=507), StorageFull),
        (AwsError("InternalServerError", "", status=500), Unavailable),
        (AwsError("ConditionalCheckFailedException", ""), AwsError),
        (AwsError("AccessDeniedException", ""), NotAllowed),
        (AwsError("ValidationException", ""), AwsError),
    ],
)
async def test_an_aws_error_is_raised_as_the_error_of_the_port(
    said: AwsError, raised: type[Exception], autojump_clock: MockClock
) -> None:
    with pytest.raises(raised):
        await an_aws_client(ScriptedTransport(said)).call("any", "UpdateItem", {})


@pytest.mark.parametrize(
    ("reasons", "attempts"),
    [
        (("None", "TransactionConflict"), ATTEMPTS_MAX),
        (("TransactionConflict", "ConditionalCheckFailed"), 1),
        (("None", "ConditionalCheckFailed"), 1),
        ((), 1),
    ],
)
async def test_a_transaction_that_only_conflicts_cancelled_is_repeated(
    reasons: tuple[str, ...], attempts: int, autojump_clock: MockClock
) -> None:
    transport = ScriptedTransport(AwsError("TransactionCanceledException", "", reasons=reasons))

    with pytest.raises((AwsError, Unavailable)):
        await an_aws_client(transport).call("dynamodb", "TransactWriteItems", ONCE)

    assert len(transport.asked) == attempts


class Losing:
    """Loses every answer after the call took effect."""

    async def before(self, service: str, operation: str, params: Mapping[str, Any]) -> None:
        pass

    async def after(self, service: str, operation: str, params: Mapping[str, Any]) -> None:
        raise LOST


class Stalling(Losing):
    async def before(self, service: str, operation: str, params: Mapping[str, Any]) -> None:
        await trio.sleep(3600)


async def test_an_injected_stall_ends_at_the_deadline(autojump_clock: MockClock) -> None:
    transport = ScriptedTransport({})

    with pytest.raises(Unavailable):
        await an_aws_client(transport, faults=Stalling(), deadline_s=7.0).call(
            "dynamodb", "PutItem", PUT
        )

    assert trio.current_time() == pytest.approx(7.0, abs=0.1)
    assert transport.asked == []


async def test_an_injected_fault_can_lose_the_answer_of_an_executed_call(
    autojump_clock: MockClock,
) -> None:
    transport = ScriptedTransport({})

    with pytest.raises(Unavailable):
        await an_aws_client(transport, faults=Losing()).call("dynamodb", "PutItem", GUARDED)

    assert len(transport.asked) == 1


async def test_an_interrupted_body_stream_raises_unavailable() -> None:
    async def breaking() -> Any:
        yield b"some"
        raise LOST

    async def read_all() -> None:
        async with client.open("s3", "GetObject", {}) as answer:
            async for _ in answer["Body"]:
                pass

    body: ScriptedAnswer = {"Body": breaking()}
    client = an_aws_client(ScriptedTransport(body))

    with pytest.raises(Unavailable):
        await read_all()


async def test_the_delay_between_retries_grows_up_to_its_maximum(
    autojump_clock: MockClock,
) -> None:
    class Most:
        def uniform(self, a: float, b: float, /) -> float:
            waits.append(b)
            return a

        def getrandbits(self, k: int, /) -> int:
            return 0

    waits: list[float] = []
    client = RetryingAwsClient(transport=ScriptedTransport(THROTTLED), random=Most())

    with pytest.raises(Unavailable):
        await client.call("dynamodb", "GetItem", {})

    assert waits == sorted(waits)
    assert len(waits) == ATTEMPTS_MAX
    assert waits[-1] <= BACKOFF_S_MAX


async def test_each_missing_permission_is_logged_once_a_minute(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    refused = AwsError("AccessDeniedException", "user x may not perform: dynamodb:PutItem")
    client = RetryingAwsClient(
        transport=ScriptedTransport(refused), random=Random(1), refusals=RefusalLog()
    )

    for wait_s in (0.0, REFUSAL_LOGGED_S / 2, REFUSAL_LOGGED_S):
        await trio.sleep(wait_s)
        for operation in ("PutItem", "TransactWriteItems"):
            with pytest.raises(NotAllowed):
                await client.call("dynamodb", operation, GUARDED)

    causes = [record.__dict__["cause"] for record in caplog.records]
    assert [cause.partition(":")[0] for cause in causes] == [
        "dynamodb.PutItem",
        "dynamodb.TransactWriteItems",
    ] * 2
    assert all("missing permission: dynamodb:PutItem" in cause for cause in causes)


async def test_a_throttled_call_is_not_reported_as_refused(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    client = RetryingAwsClient(
        transport=ScriptedTransport(THROTTLED), random=Random(1), refusals=RefusalLog()
    )

    with pytest.raises(NotApplied):
        await client.call("dynamodb", "GetItem", {})

    assert caplog.records == []
