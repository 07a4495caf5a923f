"""Creation of the table by `init`: where there is none, a new one, and one with another schema."""

from __future__ import annotations

from typing import Any

import pytest
from trio.testing import MockClock

from conveyor.engines.aws.dynamodb.keys import INDEXES, PK, SK
from conveyor.engines.aws.dynamodb.table import Table, WrongTable, create_table
from conveyor.engines.aws.errors import AwsError
from tests.aws import an_aws_client
from tests.engines.aws.scripted import ScriptedTransport


@pytest.mark.slow
async def test_creating_the_table_again_changes_nothing(table: Table) -> None:
    await create_table(table.client, table.name)


async def test_a_new_table_that_is_not_visible_yet_is_waited_for(
    autojump_clock: MockClock,
) -> None:
    transport = ScriptedTransport({}, AwsError("ResourceNotFoundException", ""), _described(), {})

    await create_table(an_aws_client(transport), "rows")

    asked = [operation for _, operation, _ in transport.asked]
    assert asked[:3] == ["CreateTable", "DescribeTable", "DescribeTable"]
    assert asked[-1] == "UpdateTimeToLive"


async def test_a_table_with_another_key_schema_is_refused() -> None:
    transport = ScriptedTransport(
        AwsError("ResourceInUseException", ""), _described(keys=("id", "sort"))
    )

    with pytest.raises(WrongTable, match="give CONVEYOR_TABLE another name"):
        await create_table(an_aws_client(transport), "rows")


async def test_a_table_with_another_expiry_attribute_is_refused() -> None:
    expiry = {"TimeToLiveStatus": "ENABLED", "AttributeName": "expires"}
    transport = ScriptedTransport(
        AwsError("ResourceInUseException", ""), _described(), {"TimeToLiveDescription": expiry}
    )

    with pytest.raises(WrongTable, match="by expires"):
        await create_table(an_aws_client(transport), "rows")


def _described(*, keys: tuple[str, str] = (PK, SK)) -> dict[str, Any]:
    indexes = [
        {"IndexName": index.name, "KeySchema": _schema(index.pk, index.sk)} for index in INDEXES
    ]
    table = {"TableStatus": "ACTIVE", "KeySchema": _schema(*keys)}
    return {"Table": {**table, "GlobalSecondaryIndexes": indexes}}


def _schema(partition: str, sort: str) -> list[dict[str, str]]:
    return [
        {"AttributeName": partition, "KeyType": "HASH"},
        {"AttributeName": sort, "KeyType": "RANGE"},
    ]
