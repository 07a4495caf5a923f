"""Compares the model of DynamoDB with a server, on random requests."""

from __future__ import annotations

from decimal import Decimal
from itertools import count
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from conveyor.engines.aws.client.client import AwsTransport
from conveyor.engines.aws.errors import AwsError, NoResponse
from conveyor.simulation.models import AwsModel, FaultSource
from tests.aws import an_access, an_http_transport
from tests.builders import ManualClock
from tests.simulation.models.requests import TABLE, Call, calls

pytestmark = pytest.mark.slow

CALL_COUNT = 40
DEADLINE_S = 10.0
_names = count()
_definition = {
    "BillingMode": "PAY_PER_REQUEST",
    "KeySchema": [
        {"AttributeName": "pk", "KeyType": "HASH"},
        {"AttributeName": "sk", "KeyType": "RANGE"},
    ],
    "AttributeDefinitions": [
        {"AttributeName": name, "AttributeType": "S"} for name in ("pk", "sk", "g1", "g1s")
    ],
    "GlobalSecondaryIndexes": [
        {
            "IndexName": "GSI1",
            "KeySchema": [
                {"AttributeName": "g1", "KeyType": "HASH"},
                {"AttributeName": "g1s", "KeyType": "RANGE"},
            ],
            "Projection": {"ProjectionType": "KEYS_ONLY"},
        }
    ],
}


class Table:
    """A table behind a transport."""

    def __init__(self, transport: AwsTransport, name: str) -> None:
        self._transport = transport
        self._name = name

    async def ask(self, operation: str, params: Any) -> Any:
        try:
            answer = await self._call(operation, params)
        except AwsError as error:
            return error.code, error.reasons
        return _plain(answer)

    async def _call(self, operation: str, params: Any) -> Any:
        if operation == "Query":
            return await self._all_pages(params)
        return await self._transport.call(
            "dynamodb", operation, self._here(params), deadline_s=DEADLINE_S
        )

    async def _all_pages(self, params: Any) -> list[Any]:
        """Reads all pages, because servers differ in whether the last page has a key."""
        items: list[Any] = []
        page_request = dict(params)
        while True:
            page = await self._transport.call(
                "dynamodb", "Query", self._here(page_request), deadline_s=DEADLINE_S
            )
            items += page["Items"]
            if not page.get("LastEvaluatedKey"):
                return items
            page_request["ExclusiveStartKey"] = page["LastEvaluatedKey"]

    def _here(self, value: Any) -> Any:
        """Replaces the name of the table, because the server keeps the tables of all examples."""
        if isinstance(value, dict):
            return {
                self._name if key == TABLE else key: self._here(inner)
                for key, inner in value.items()
            }
        if isinstance(value, list):
            return [self._here(inner) for inner in value]
        if isinstance(value, str):  # Statements have the name of the table in their text.
            value = value.replace(f'INTO "{TABLE}"', f'INTO "{self._name}"')
        return self._name if value == TABLE else value


def _plain(value: Any) -> Any:
    """Removes differences that servers are free in: forms of numbers, table names, empty leftovers,
    the order of keys in a batch, and the order of equal keys in an index."""
    if isinstance(value, dict):
        if value.keys() == {"N"}:
            return {"N": Decimal(value["N"]).normalize()}
        if isinstance(value.get("Responses"), list):
            return [response.get("Error", {}).get("Code") for response in value["Responses"]]
        if "Responses" in value:
            return [sorted(_plain(rows), key=repr) for rows in value["Responses"].values() if rows]
        return {key: _plain(inner) for key, inner in value.items() if inner not in ({}, [])}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


async def _compare_on_both(url: str, requests: list[Call]) -> None:
    name = f"agreed-{next(_names)}"  # Other tests have tables on this server.
    model = AwsModel(clock=ManualClock(), fault_source=FaultSource(random=Random(1)))
    async with an_http_transport(an_access(dynamodb=url)) as server:
        for transport in (model, server):
            request = {"TableName": name, **_definition}
            await transport.call("dynamodb", "CreateTable", request, deadline_s=DEADLINE_S)
        ours, theirs = Table(model, name), Table(server, name)
        for operation, params in requests:
            answer = await ours.ask(operation, params)
            expected = await theirs.ask(operation, params)

            assert answer == expected, (operation, params)


some_calls = st.lists(calls(), min_size=CALL_COUNT, max_size=CALL_COUNT)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(requests=some_calls)
async def test_the_model_answers_as_a_server_does(ministack: str, requests: list[Call]) -> None:
    try:
        await _compare_on_both(ministack, requests)
    except NoResponse:  # The server may or may not have applied the call.
        reject()
