"""The operations on tables: create, describe, delete, and the settings of expiry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from conveyor.engines.aws.errors import AwsError
from conveyor.simulation.models.dynamodb.tables import Table, table_of
from conveyor.simulation.models.dynamodb.values import NotModelled
from conveyor.simulation.models.fault_source import FaultSource

Params = Mapping[str, Any]


def do(
    tables: dict[str, Table],
    fault_source: FaultSource,
    now: Callable[[], float],
    operation: str,
    params: Params,
) -> dict[str, Any]:
    """Performs an operation on a table."""
    name = params["TableName"]
    if operation == "CreateTable":
        if name in tables:
            raise AwsError("ResourceInUseException", f"Table already exists: {name}")
        tables[name] = table_of(params, fault_source, now)
        return {"TableDescription": _described(tables[name])}
    if name not in tables:
        raise AwsError("ResourceNotFoundException", f"Requested resource not found: {name}")
    table = tables[name]
    match operation:
        case "DescribeTable":
            return {"Table": _described(table)}
        case "DeleteTable":
            del tables[name]
            return {"TableDescription": _described(table)}
        case "DescribeTimeToLive":
            return {"TimeToLiveDescription": _expiry(table)}
        case "UpdateTimeToLive":
            specification = params["TimeToLiveSpecification"]
            table.expiry = specification["AttributeName"] if specification["Enabled"] else None
            return {"TimeToLiveSpecification": dict(specification)}
        case _:
            raise NotModelled(f"dynamodb.{operation}")


def _described(table: Table) -> dict[str, Any]:
    indexes = [
        {"IndexName": name, "IndexStatus": "ACTIVE", "KeySchema": _schema(index.pk, index.sk)}
        for name, index in table.indexes.items()
    ]
    described = {
        "TableName": table.definition["TableName"],
        "TableStatus": "ACTIVE",
        "KeySchema": _schema(table.pk, table.sk),
    }
    return described | ({"GlobalSecondaryIndexes": indexes} if indexes else {})


def _schema(pk: str, sk: str) -> list[dict[str, str]]:
    return [
        {"AttributeName": pk, "KeyType": "HASH"},
        {"AttributeName": sk, "KeyType": "RANGE"},
    ]


def _expiry(table: Table) -> dict[str, str]:
    if table.expiry is None:
        return {"TimeToLiveStatus": "DISABLED"}
    return {"TimeToLiveStatus": "ENABLED", "AttributeName": table.expiry}
