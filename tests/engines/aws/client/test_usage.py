"""The meter counts what AWS bills: capacity units, requests, and their list price."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from conveyor.engines.aws.client.usage import STEP, Usage, capacity_of, item_bytes, sqs_requests_of
from conveyor.engines.aws.errors import AwsError
from tests.aws import an_aws_client
from tests.engines.aws.scripted import THROTTLED, ScriptedTransport

KILOBYTE = {"pk": {"S": "x" * 1022}}
BIG = {"pk": {"S": "x" * 4095}}
PUT = {"Put": {"Item": KILOBYTE}}


@pytest.mark.parametrize(
    ("item", "size"),
    [
        (KILOBYTE, 1024),
        ({"n": {"N": "1234"}}, 5),
        ({"é": {"S": "☃"}}, 5),
        ({"b": {"B": b"123"}}, 4),
        ({"f": {"BOOL": True}}, 2),
        ({"m": {"M": {"a": {"S": "b"}}}}, 7),
        ({"l": {"L": [{"S": "b"}]}}, 6),
        ({"s": {"SS": ["a", "bc"]}}, 4),
    ],
)
def test_the_size_of_an_item_includes_its_names_and_values(item: dict[str, Any], size: int) -> None:
    assert item_bytes(item) == size


@pytest.mark.parametrize(
    ("operation", "params", "answer", "reads", "writes"),
    [
        ("PutItem", {"Item": KILOBYTE}, {}, 0, 1),
        ("PutItem", {"Item": BIG}, {}, 0, 5),
        ("DeleteItem", {"Key": {"pk": {"S": "a"}}}, {}, 0, 1),
        ("TransactWriteItems", {"TransactItems": [PUT, PUT]}, {}, 0, 4),
        ("BatchWriteItem", {"RequestItems": {"t": [{"PutRequest": {"Item": BIG}}]}}, {}, 0, 5),
        ("GetItem", {}, {}, 0.5, 0),
        ("GetItem", {"ConsistentRead": True}, {"Item": BIG}, 2, 0),
        ("GetItem", {}, {"Item": BIG}, 1, 0),
        ("Query", {}, {"Items": [KILOBYTE] * 5}, 1, 0),
        ("Query", {"ConsistentRead": True}, {"Items": [KILOBYTE] * 5}, 2, 0),
        ("TransactGetItems", {}, {"Responses": [{"Item": BIG}, {}]}, 6, 0),
        ("Query", {}, {"ConsumedCapacity": {"CapacityUnits": 7.5}, "Items": []}, 7.5, 0),
    ],
)
def test_capacity_is_counted_by_size_and_kind(
    operation: str, params: dict[str, Any], answer: dict[str, Any], reads: float, writes: float
) -> None:
    assert capacity_of(operation, params, answer) == (reads, writes)


INDEXES = (("g1", "g1s"), ("g2", "g2s"))
SHOWN = {"pk": {"S": "a"}, "g1": {"S": "b"}, "g1s": {"S": "c"}}
MOVED = {
    "Key": {"pk": {"S": "a"}},
    "UpdateExpression": "SET #status = :0, #g2 = :1 REMOVE #g1s",
    "ExpressionAttributeNames": {"#status": "status", "#g2": "g2", "#g1s": "g1s"},
}


@pytest.mark.parametrize(
    ("operation", "params", "writes"),
    [
        ("PutItem", {"Item": SHOWN}, 2),
        ("PutItem", {"Item": {**SHOWN, "g2": {"S": "no sort key, so not shown"}}}, 2),
        ("UpdateItem", MOVED, 1 + 2 + 1),
        ("TransactWriteItems", {"TransactItems": [{"Update": MOVED}, PUT]}, 2 * (4 + 1)),
        ("BatchWriteItem", {"RequestItems": {"t": [{"PutRequest": {"Item": SHOWN}}]}}, 2),
    ],
)
def test_index_writes_caused_by_a_write_are_counted(
    operation: str, params: dict[str, Any], writes: float
) -> None:
    assert capacity_of(operation, params, {}, INDEXES) == (0, writes)


async def test_calls_are_counted_under_their_current_step() -> None:
    client = an_aws_client(ScriptedTransport({}))
    assert client.meter is not None

    await client.call("sqs", "ReceiveMessage", {})
    STEP.set("claim")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.call, "dynamodb", "PutItem", {"Item": KILOBYTE})
    client.meter.count_redis("renew")

    assert client.meter.steps == {
        "": Usage(calls=1, price_millionths=0.4),
        "claim": Usage(calls=2, write_units=1, price_millionths=0.625),
    }


@pytest.mark.parametrize(
    ("params", "answer", "requests"),
    [
        ({"MessageBody": "x"}, {}, 1),
        ({"Entries": [{"MessageBody": "x" * 65536}, {"MessageBody": "x"}]}, {}, 2),
        ({}, {"Messages": [{"Body": "x" * 40000}] * 4}, 3),
        ({}, {}, 1),
    ],
)
def test_every_64_kilobytes_of_messages_are_a_request(
    params: dict[str, Any], answer: dict[str, Any], requests: int
) -> None:
    assert sqs_requests_of(params, answer) == requests


async def test_every_attempt_is_counted_and_a_throttled_one_costs_nothing(
    autojump_clock: object,
) -> None:
    client = an_aws_client(ScriptedTransport(THROTTLED, {}))

    await client.call("dynamodb", "PutItem", {"Item": KILOBYTE})

    assert client.meter is not None
    assert client.meter.calls == {"dynamodb.PutItem": 2}
    assert client.meter.failures == {"dynamodb.PutItem": 1}
    assert client.meter.retries == {"dynamodb.PutItem": 1}
    assert client.meter.write_units == 1


async def test_a_write_with_a_failed_condition_costs_as_much() -> None:
    client = an_aws_client(ScriptedTransport(AwsError("ConditionalCheckFailedException", "")))

    with pytest.raises(AwsError):
        await client.call("dynamodb", "PutItem", {"Item": KILOBYTE})

    assert client.meter is not None
    assert client.meter.write_units == 1


async def test_the_price_is_the_sum_of_the_list_prices() -> None:
    client = an_aws_client(ScriptedTransport({}))

    await client.call("dynamodb", "PutItem", {"Item": KILOBYTE})
    await client.call("sqs", "ReceiveMessage", {})
    await client.call("s3", "PutObject", {})
    await client.call("s3", "GetObject", {})
    await client.call("s3", "DeleteObject", {})

    assert client.meter is not None
    assert client.meter.price_millionths == pytest.approx(0.625 + 0.4 + 5.0 + 0.4)
    assert (client.meter.sqs_requests, client.meter.s3_requests) == (1, 3)
