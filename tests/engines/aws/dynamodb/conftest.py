"""Fixture: a table for each test on one shared server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import count

import pytest

from conveyor.engines.aws.dynamodb.table import Table
from tests.aws import a_table, an_access, an_aws_client, an_http_transport

_numbers = count()


@pytest.fixture
async def table(ministack: str) -> AsyncIterator[Table]:
    name = f"rows-{next(_numbers)}"
    async with an_http_transport(an_access(dynamodb=ministack)) as transport:
        yield await a_table(an_aws_client(transport), name)
