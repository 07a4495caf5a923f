"""Fixtures: a local AWS with both stacks, and an API and two workers as containers."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from conveyor.cli.demo import Site, site_in_a_thread
from tests.deploy.containers.stage import Stage, a_stage

# `make test-deploy` builds the image and sets the variable.
if not os.environ.get("CONVEYOR_TEST_IMAGE"):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with a_stage(tmp_path_factory.mktemp("stage")) as stage:
        stage.deploy()
        stage.allow_batches()
        stage.add_key("a-second-key-0123456789")
        yield stage


@pytest.fixture(scope="session")
def url(stage: Stage) -> str:
    """The URL of an API with two workers."""
    api = stage.start("api")
    for _ in range(2):
        stage.start("worker")
    return f"http://127.0.0.1:{api.port}"


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    with site_in_a_thread() as site:
        yield site
