"""One queue per test, of every kind.

A queue whose time cannot be moved is left out of the tests that use the `clock` fixture."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from conveyor.ports.queue import Queue
from tests.conformance.queue.queues import QUEUES, TIMELESS


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    names = QUEUES if "clock" in metafunc.fixturenames else [*QUEUES, *TIMELESS]
    metafunc.parametrize("queue", sorted(names), indirect=True)


@pytest.fixture
async def queue(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Queue]:
    if request.param in TIMELESS:
        opening = TIMELESS[request.param](request.getfixturevalue("localstack"))
    else:
        opening = QUEUES[request.param](tmp_path, request.getfixturevalue("clock"))
    async with opening as queue:
        yield queue
