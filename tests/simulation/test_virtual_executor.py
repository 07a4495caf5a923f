"""Tests that the embedded engine translates faults of the simulated disk into port errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest
from trio.testing import MockClock

from conveyor.engines.sqlite import EmbeddedEngine, open_engine
from conveyor.ports.errors import StorageFull, Unavailable
from conveyor.ports.queue import Depth
from conveyor.simulation.faults.faults import Fault, Faults
from conveyor.simulation.virtual_executor import VirtualExecutor
from tests.builders import RUN, ManualClock


@pytest.fixture
def faults(request: pytest.FixtureRequest) -> Faults:
    fault: Fault = request.param
    return Faults({fault: 1.0}, Random(1))


@pytest.fixture
async def engine(
    tmp_path: Path, faults: Faults, autojump_clock: MockClock
) -> AsyncIterator[EmbeddedEngine]:
    executor = VirtualExecutor(faults, Random(1))
    clock = ManualClock()
    async with open_engine(
        tmp_path / "data", clock=clock, random=Random(1), owner="test", executor=executor
    ) as engine:
        yield engine


async def pieces() -> AsyncIterator[bytes]:
    yield b"body"


@pytest.mark.parametrize("faults", [Fault.BODY_TORN], indirect=True)
async def test_a_body_that_does_not_fit_on_the_disk_is_not_stored(
    engine: EmbeddedEngine, tmp_path: Path, faults: Faults
) -> None:
    with pytest.raises(StorageFull):
        await engine.blobs.put("jobs/j/a", [b"body"])
    with pytest.raises(StorageFull):
        await engine.blobs.put_stream("jobs/j/b", pieces())

    assert faults.counts[Fault.BODY_TORN] == 2
    assert [path for path in (tmp_path / "data").rglob("*,*") if path.is_file()] == []


@pytest.mark.parametrize("faults", [Fault.BODY_TORN], indirect=True)
async def test_no_body_is_appended_after_a_partial_one(
    engine: EmbeddedEngine, faults: Faults
) -> None:
    with pytest.raises(StorageFull):
        await engine.blobs.add("jobs/j", "a", [b"first"])
    faults.stop_faults()

    stored = await engine.blobs.add("jobs/j", "b", [b"second"])

    assert b"".join([piece async for piece in engine.blobs.open(stored.key)]) == b"second"


@pytest.mark.parametrize("faults", [Fault.READ_FAILED, Fault.READ_BUSY], indirect=True)
async def test_a_failed_read_is_reported_as_unavailable(
    engine: EmbeddedEngine, faults: Faults
) -> None:
    with pytest.raises(Unavailable):
        await engine.queue.depth(RUN)
    faults.stop_faults()

    assert await engine.queue.depth(RUN) == Depth(visible=0, hidden=0)
