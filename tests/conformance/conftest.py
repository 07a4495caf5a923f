"""Fixtures: one engine of every kind per test, and its ports by name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest

from conveyor.ports.blobs import Blobs
from conveyor.ports.cache import Cache
from conveyor.ports.coordinator import Coordinator
from conveyor.ports.queue import Queue
from conveyor.ports.store import Store
from tests.builders import ManualClock
from tests.conformance.bodies import BLOBS
from tests.conformance.caches import CACHES
from tests.conformance.coordinators import COORDINATORS
from tests.conformance.engines import ENGINES, Engine


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=sorted(ENGINES))
async def engine(
    request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock
) -> AsyncIterator[Engine]:
    async with ENGINES[request.param](tmp_path, clock, Random(1)) as engine:
        yield engine


@pytest.fixture
def store(engine: Engine) -> Store:
    return engine.store


@pytest.fixture
def queue(engine: Engine) -> Queue:
    return engine.queue


@pytest.fixture(params=sorted(BLOBS))
async def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Blobs]:
    async with BLOBS[request.param](request, tmp_path) as blobs:
        yield blobs


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.slow if name == "dynamo" else ())
        for name in sorted(COORDINATORS)
    ]
)
async def coordinator(
    request: pytest.FixtureRequest, clock: ManualClock
) -> AsyncIterator[Coordinator]:
    async with COORDINATORS[request.param](request.param, request, clock) as coordinator:
        yield coordinator


@pytest.fixture(params=sorted(CACHES))
async def cache(request: pytest.FixtureRequest, clock: ManualClock) -> AsyncIterator[Cache]:
    async with CACHES[request.param](request.param, request, clock) as cache:
        yield cache
