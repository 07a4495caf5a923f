"""Batched inserts: the answer to each statement decides about its row alone."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from conveyor.engines.aws.client.client import RetryingAwsClient
from conveyor.engines.aws.client.usage import Meter
from conveyor.engines.aws.dynamodb.items import Item
from conveyor.engines.aws.dynamodb.table import WRITTEN_MAX, Table
from conveyor.engines.aws.errors import AwsError, NotAllowed
from conveyor.ports.errors import Unavailable
from tests.aws import an_aws_client
from tests.engines.aws.scripted import ScriptedTransport


def an_item(number: int, **fields: Any) -> Item:
    return {"pk": {"S": "p"}, "sk": {"S": f"{number:03}"}, **fields}


def answering(*codes: str | None) -> Table:
    responses = [{} if code is None else {"Error": {"Code": code}} for code in codes]
    transport = ScriptedTransport({"Responses": responses})
    return Table(name="rows", client=an_aws_client(transport), random=Random(1))


@pytest.mark.slow
async def test_an_insert_keeps_the_items_that_exist(table: Table) -> None:
    await table.insert([an_item(1, status={"S": "ended"})])

    left = await table.insert([an_item(number, status={"S": "new"}) for number in range(3)])

    items = await table.get_items([("p", f"{number:03}") for number in range(3)])
    assert left == []
    assert [item["status"]["S"] for item in items.values()] == ["new", "ended", "new"]


@pytest.mark.slow
async def test_any_field_value_is_inserted_unchanged(table: Table) -> None:
    item = an_item(
        1,
        url={"S": "https://example.com/?a='b'&c=\"?\"{};--"},
        empty={"S": ""},
        stamp={"N": "1700000000.25"},
        flag={"BOOL": False},
        nothing={"NULL": True},
        params={"M": {"key 'with' quotes": {"S": "☃"}, "list": {"L": [{"N": "1"}]}}},
    )

    await table.insert([item])

    assert list((await table.get_items([("p", "001")])).values()) == [item]


@pytest.mark.slow
async def test_a_full_batch_is_one_call_that_costs_one_unit_per_item(table: Table) -> None:
    assert isinstance(table.client, RetryingAwsClient)
    meter = Meter()
    metered = replace(table, client=replace(table.client, meter=meter))

    await metered.insert([an_item(number) for number in range(WRITTEN_MAX)])

    assert meter.calls["dynamodb.BatchExecuteStatement"] == 1
    assert meter.write_units == WRITTEN_MAX


@pytest.mark.parametrize(
    "code",
    [
        "InternalServerError",
        "ProvisionedThroughputExceeded",
        "RequestLimitExceeded",
        "ThrottlingError",
        "TransactionConflict",
    ],
)
async def test_a_throttled_statement_is_returned_as_not_done(code: str) -> None:
    table = answering(None, code, "DuplicateItem", None)

    assert await table.insert([an_item(number) for number in range(4)]) == [1]


@pytest.mark.parametrize("code", ["ValidationError", "ResourceNotFound", "SomethingNew"])
async def test_a_permanent_error_of_a_statement_is_raised(code: str) -> None:
    with pytest.raises(AwsError, match=code):
        await answering(None, code).insert([an_item(1), an_item(2)])


async def test_a_missing_permission_of_a_statement_is_named() -> None:
    with pytest.raises(NotAllowed, match="dynamodb:PartiQLInsert"):
        await answering("AccessDenied").insert([an_item(1)])


async def test_an_answer_that_lacks_a_statement_has_an_unknown_outcome() -> None:
    with pytest.raises(Unavailable):
        await answering(None).insert([an_item(1), an_item(2)])
