"""A server for all tests of a process, and empty tables for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from conveyor.engines.postgres.database import Database, DatabaseConfig, open_database
from tests.builders import ManualClock
from tests.postgres import empty_tables
from tests.servers import Postgres, a_postgres


@pytest.fixture(scope="session")
def server() -> Iterator[Postgres]:
    with a_postgres() as server:
        yield server


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def url(server: Postgres) -> AsyncIterator[str]:
    async with empty_tables(server.url) as url:
        yield url


@pytest.fixture
async def database(url: str) -> AsyncIterator[Database]:
    async with open_database(DatabaseConfig(url=url)) as database:
        yield database
