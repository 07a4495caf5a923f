"""The schema: the table, its indexes and its expiry, made where they are not there
(docs/storage.md, DynamoDB table)."""

from __future__ import annotations

from typing import Any

import trio

from conveyor.domain.errors import ConveyorError
from conveyor.engines.aws.dynamo.layout import INDEXES, PK, SK, TTL
from conveyor.engines.aws.errors import AwsError
from conveyor.engines.aws.seam import Seam
from conveyor.ports.errors import Unavailable

LOOK_S = 1.0
LOOKS_MAX = 300

_THERE = "ResourceInUseException"
_NOT_THERE = "ResourceNotFoundException"
_READY = "ACTIVE"


class WrongTable(ConveyorError):
    """There is a table of that name, and it is none of ours."""


async def create_table(seam: Seam, name: str) -> None:
    """Makes the table and waits until it can be used; making it again is fine. WrongTable when
    there is one of that name with other keys."""
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
    try:
        table = (await seam.call("dynamodb", "DescribeTable", {"TableName": name}))["Table"]
    except AwsError as error:
        if error.code != _NOT_THERE:
            raise
        return False  # It was made a moment ago, and not everybody knows it yet.
    _check_keys(name, table)
    states = [each.get("IndexStatus", _READY) for each in table.get("GlobalSecondaryIndexes", ())]
    return all(state == _READY for state in [table["TableStatus"], *states])


def _check_keys(name: str, table: dict[str, Any]) -> None:
    wanted = _definition(name)
    indexes = {each["IndexName"]: each for each in table.get("GlobalSecondaryIndexes", ())}
    pairs = [(wanted["KeySchema"], table.get("KeySchema"))]
    for index in wanted["GlobalSecondaryIndexes"]:
        there = indexes.get(index["IndexName"], {})
        pairs.append((index["KeySchema"], there.get("KeySchema")))
    if any(ours != theirs for ours, theirs in pairs):
        raise WrongTable(
            f"table {name} is there with other keys or indexes than Conveyor's: "
            "give CONVEYOR_TABLE another name, or remove that table"
        )


async def _let_rows_expire(seam: Seam, name: str) -> None:
    said = await seam.call("dynamodb", "DescribeTimeToLive", {"TableName": name})
    there = said.get("TimeToLiveDescription", {})
    if there.get("TimeToLiveStatus") in {"ENABLED", "ENABLING"}:
        if there.get("AttributeName", TTL) != TTL:
            raise WrongTable(
                f"table {name} lets rows expire by {there['AttributeName']}, not {TTL}"
            )
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
