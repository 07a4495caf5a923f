"""What holds for every test: in CI, generated cases are the same every time. Servers, by name."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests import servers

settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("local", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(scope="session")
def ministack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """DynamoDB and Step Functions."""
    with servers.a_ministack(tmp_path_factory.mktemp("ministack")) as url:
        yield url


@pytest.fixture(scope="session")
def strict_ministack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One that checks signatures."""
    with servers.a_ministack(tmp_path_factory.mktemp("strict"), {"AUTH": "true"}) as url:
        yield url


@pytest.fixture(scope="session")
def localstack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """SQS."""
    with servers.a_localstack(tmp_path_factory.mktemp("localstack")) as url:
        yield url


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """S3, with signatures checked."""
    with servers.a_seaweed(tmp_path_factory.mktemp("seaweed") / "home") as url:
        yield url


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A little of everything, and nothing atomic."""
    with servers.a_moto(tmp_path_factory.mktemp("moto")) as url:
        yield url


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with servers.a_redis(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture(scope="session")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with servers.a_redis_cluster(tmp_path_factory.mktemp("redis-cluster")) as url:
        yield url
