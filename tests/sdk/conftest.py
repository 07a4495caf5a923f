"""Servers for the SDK: a scripted one for each test, and a real one for all tests."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from conveyor.cli.demo import Site, site_in_a_thread
from conveyor.sdk import Client
from tests.cli.program import dev_server
from tests.sdk.scripted import Scripted, scripted_server


@pytest.fixture
def script() -> Iterator[Scripted]:
    with scripted_server() as script:
        yield script


@pytest.fixture
def pauses() -> list[float]:
    """The pauses that the client would have made, in seconds."""
    return []


@pytest.fixture
def client(script: Scripted, pauses: list[float]) -> Iterator[Client]:
    with Client(script.url, "k", timeout_s=5, sleep=pauses.append) as client:
        yield client


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with dev_server(tmp_path_factory.mktemp("dev")) as url:
        yield url


@pytest.fixture
def caller(server: str) -> Iterator[Client]:
    """A client with an API key that the real server has not seen before."""
    with Client(server, secrets.token_hex(8)) as client:
        yield client


@pytest.fixture
def site() -> Iterator[Site]:
    with site_in_a_thread() as site:
        yield site
