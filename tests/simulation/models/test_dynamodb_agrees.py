"""The model of DynamoDB answers as a server does, whatever is asked of both."""

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
    """One table behind a transport, and what came of the calls to it."""

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
        """Servers may or may not say that there could be more when there is not."""
        items: list[Any] = []
        asked = dict(params)
        while True:
            page = await self._transport.call(
                "dynamodb", "Query", self._here(asked), deadline_s=DEADLINE_S
            )
            items += page["Items"]
            if not page.get("LastEvaluatedKey"):
                return items
            asked["ExclusiveStartKey"] = page["LastEvaluatedKey"]

    def _here(self, value: Any) -> Any:
        """The request with this table's name: servers keep the tables of all examples."""
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
    """An answer without what servers are free in: forms of numbers, table names, empty leftovers,
    the order of what was asked for by key, and of equals in an index."""
    if isinstance(value, dict):
        if value.keys() == {"N"}:
            return {"N": Decimal(value["N"]).normalize()}
        if isinstance(value.get("Responses"), list):
            return [response.get("Error", {}).get("Code") for response in value["Responses"]]
        if "Responses" in value:
            return [sorted(_plain(rows), key=repr) for rows in value["Responses"].values() if rows]
        return {key: _plain(inner) for key, inner in value.items() if inner not in ({}, [])}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


async def _both(url: str, asked: list[Call]) -> None:
    name = f"agreed-{next(_names)}"  # Others have rows on this server too.
    model = AwsModel(clock=ManualClock(), fault_source=FaultSource(random=Random(1)))
    async with an_http_transport(an_access(dynamodb=url)) as server:
        for transport in (model, server):
            request = {"TableName": name, **_definition}
            await transport.call("dynamodb", "CreateTable", request, deadline_s=DEADLINE_S)
        ours, theirs = Table(model, name), Table(server, name)
        for operation, params in asked:
            said = await ours.ask(operation, params)
            expected = await theirs.ask(operation, params)

            assert said == expected, (operation, params)


some_calls = st.lists(calls(), min_size=CALL_COUNT, max_size=CALL_COUNT)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(asked=some_calls)
async def test_the_model_answers_as_a_server_does(ministack: str, asked: list[Call]) -> None:
    try:
        await _both(ministack, asked)
    except NoResponse:  # Whether the server did it is anybody's guess.
        reject()
