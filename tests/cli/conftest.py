"""A program in a folder of its own, a site to scrape, and a server that all these tests share."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from conveyor.cli.demo import Site, site_in_a_thread
from tests.cli.program import Program, dev_server


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path, {"CONVEYOR_ALLOW_PRIVATE_TARGETS": "1"})


@pytest.fixture
def site() -> Iterator[Site]:
    with site_in_a_thread() as site:
        yield site


@pytest.fixture(scope="session")
def server_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dev")


@pytest.fixture(scope="session")
def server(server_folder: Path) -> Iterator[str]:
    with dev_server(server_folder) as url:
        yield url


@pytest.fixture
def caller(tmp_path: Path, server: str) -> Program:
    """The program as a caller that the server has not heard of before."""
    key = secrets.token_hex(8)
    return Program(tmp_path, {"CONVEYOR_URL": server, "CONVEYOR_API_KEY": key})
