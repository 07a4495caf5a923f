"""The schema: the table, its indexes and its expiry, made where they are not there (SPEC 5.10)."""

from __future__ import annotations

from typing import Any

import trio

from conveyor.engines.aws.dynamo.layout import INDEXES, PK, SK, TTL
from conveyor.engines.aws.errors import AwsError
from conveyor.engines.aws.seam import Seam
from conveyor.ports.errors import Unavailable

LOOK_S = 1.0
LOOKS_MAX = 300

_THERE = "ResourceInUseException"
_READY = "ACTIVE"


async def create_table(seam: Seam, name: str) -> None:
    """Makes the table and waits until it can be used; making it again is fine."""
    try:
        await seam.call("dynamodb", "CreateTable", _definition(name))
    except AwsError as error:
        if error.code != _THERE:
            raise
    for _ in range(LOOKS_MAX):
        if await _is_ready(seam, name):
            break
        await trio.sleep(LOOK_S)
    else:
        raise Unavailable(f"table {name} is not ready")
    await _let_rows_expire(seam, name)


async def _is_ready(seam: Seam, name: str) -> bool:
    table = (await seam.call("dynamodb", "DescribeTable", {"TableName": name}))["Table"]
    states = [each.get("IndexStatus", _READY) for each in table.get("GlobalSecondaryIndexes", ())]
    return all(state == _READY for state in [table["TableStatus"], *states])


async def _let_rows_expire(seam: Seam, name: str) -> None:
    said = await seam.call("dynamodb", "DescribeTimeToLive", {"TableName": name})
    state = said.get("TimeToLiveDescription", {}).get("TimeToLiveStatus")
    if state in {"ENABLED", "ENABLING"}:
        return
    expiry = {"AttributeName": TTL, "Enabled": True}
    await seam.call(
        "dynamodb", "UpdateTimeToLive", {"TableName": name, "TimeToLiveSpecification": expiry}
    )


def _definition(name: str) -> dict[str, Any]:
    """Indexes carry keys only: whoever is named by one is read again by its key."""
    attributes = [PK, SK, *(part for index in INDEXES for part in (index.pk, index.sk))]
    return {
        "TableName": name,
        "BillingMode": "PAY_PER_REQUEST",
        "KeySchema": _keys(PK, SK),
        "AttributeDefinitions": [
            {"AttributeName": each, "AttributeType": "S"} for each in attributes
        ],
        "GlobalSecondaryIndexes": [
            {
                "IndexName": index.name,
                "KeySchema": _keys(index.pk, index.sk),
                "Projection": {"ProjectionType": "KEYS_ONLY"},
            }
            for index in INDEXES
        ],
    }


def _keys(partition: str, sort: str) -> list[dict[str, str]]:
    return [
        {"AttributeName": partition, "KeyType": "HASH"},
        {"AttributeName": sort, "KeyType": "RANGE"},
    ]
