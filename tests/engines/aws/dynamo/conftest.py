"""A table of its own for each test, on one server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import count
from random import Random

import pytest

from conveyor.engines.aws.dynamo import create_table
from conveyor.engines.aws.dynamo.table import Table
from tests.aws import a_lean_plane, a_seam, an_access

_numbers = count()


@pytest.fixture
async def table(ministack: str) -> AsyncIterator[Table]:
    name = f"rows-{next(_numbers)}"
    async with a_lean_plane(an_access(dynamodb=ministack)) as plane:
        seam = a_seam(plane)
        await create_table(seam, name)
        assert seam.meter is not None
        yield Table(name=name, seam=seam, random=Random(), meter=seam.meter)
