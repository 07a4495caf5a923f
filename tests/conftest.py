"""Fixtures and settings of all tests: generated cases are reproducible in CI, and each server that
stands in for a service is a session fixture."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

from tests import servers

settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("local", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "local")

# A shell that starts the tests in the background makes them ignore Ctrl-C, and so would every
# command that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints the results of the contract tests as a table, whichever process ran them."""
    for outcome in ("passed", "failed"):
        reports = terminalreporter.stats.get(outcome, [])
        for report in reports:
            _tally(report.user_properties, outcome)
    if not _METHODS:
        return
    terminalreporter.section("the public contract")
    for name, outcome in sorted(_METHODS.items()):
        terminalreporter.line(f"{name:<60} {outcome}")
    for engine in sorted({name.rpartition(" on ")[2] for name in _METHODS}):
        outcomes = [_METHODS[name] for name in _METHODS if name.endswith(f" on {engine}")]
        passed = outcomes.count("passed")
        terminalreporter.line(f"{passed} of {len(outcomes)} names of the SDK pass on {engine}")
    for operations in sorted(_OPERATIONS):
        terminalreporter.line(f"{operations}: operations of the contract answered, all valid")


_METHODS: dict[str, str] = {}
_OPERATIONS: list[str] = []


def _tally(properties: list[tuple[str, object]], outcome: str) -> None:
    for name, value in properties:
        if name == "sdk_method":
            _METHODS[str(value)] = outcome
        elif name == "contract_operations":
            _OPERATIONS.append(str(value))


@pytest.fixture(scope="session")
def ministack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Runs ministack: DynamoDB and Step Functions."""
    with servers.a_ministack(tmp_path_factory.mktemp("ministack")) as url:
        yield url


@pytest.fixture(scope="session")
def strict_ministack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Runs a ministack that checks signatures."""
    with servers.a_ministack(tmp_path_factory.mktemp("strict"), {"AUTH": "true"}) as url:
        yield url


@pytest.fixture(scope="session")
def localstack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Runs LocalStack: SQS."""
    with servers.a_localstack(tmp_path_factory.mktemp("localstack")) as url:
        yield url


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Runs SeaweedFS: S3 with checked signatures."""
    with servers.a_seaweed(tmp_path_factory.mktemp("seaweed") / "home") as url:
        yield url


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Runs moto: all services, but without atomic operations."""
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
