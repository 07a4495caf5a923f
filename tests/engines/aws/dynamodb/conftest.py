"""A table of its own for each test, on one server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import count

import pytest

from conveyor.engines.aws.dynamodb.table import Table
from tests.aws import a_lean_plane, a_seam, a_table, an_access

_numbers = count()


@pytest.fixture
async def table(ministack: str) -> AsyncIterator[Table]:
    name = f"rows-{next(_numbers)}"
    async with a_lean_plane(an_access(dynamodb=ministack)) as transport:
        yield await a_table(a_seam(transport), name)
