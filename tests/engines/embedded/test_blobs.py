"""Bodies as files: where they lie, and what is left behind when something goes wrong."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest
import trio

from conveyor.engines.embedded import EmbeddedEngine, open_engine
from conveyor.ports.errors import Unavailable
from tests.builders import ManualClock


@pytest.fixture
async def engine(data_dir: Path, clock: ManualClock) -> AsyncIterator[EmbeddedEngine]:
    async with open_engine(data_dir, clock=clock, random=Random(1), owner="test") as engine:
        yield engine


async def test_bodies_of_a_run_lie_in_one_directory(engine: EmbeddedEngine, data_dir: Path) -> None:
    for task in ("one", "two"):
        await engine.blobs.put(f"jobs/j/runs/r/{task}/1", [b"body"])

    found = {str(path.relative_to(data_dir)) for path in data_dir.rglob("*,*")}
    assert found == {"blobs/jobs/j/runs/r/one,1", "blobs/jobs/j/runs/r/two,1"}


async def test_a_put_that_cannot_land_leaves_nothing_behind(
    engine: EmbeddedEngine, data_dir: Path
) -> None:
    (data_dir / "blobs" / "jobs").write_bytes(b"in the way")

    with pytest.raises(Unavailable):
        await engine.blobs.put("jobs/j/a/b", [b"body"])

    assert list((data_dir / "temp").iterdir()) == []


async def test_a_put_that_fails_spares_those_beside_it(
    engine: EmbeddedEngine, data_dir: Path
) -> None:
    (data_dir / "blobs" / "bad").write_bytes(b"in the way")
    failed: list[str] = []

    async def put(key: str) -> None:
        try:
            await engine.blobs.put(key, [b"body"])
        except Unavailable:
            failed.append(key)

    async with trio.open_nursery() as nursery:
        for key in [*(f"good/j/{number}/1" for number in range(20)), "bad/j/0/1"]:
            nursery.start_soon(put, key)

    assert failed == ["bad/j/0/1"]
    assert len(list((data_dir / "blobs/good/j").iterdir())) == 20


async def test_everybody_whose_bodies_go_together_hears_that_there_is_no_place_for_them(
    engine: EmbeddedEngine, data_dir: Path
) -> None:
    (data_dir / "blobs" / "bad").write_bytes(b"in the way")
    failed: list[int] = []

    async def add(number: int) -> None:
        with pytest.raises(Unavailable):
            await engine.blobs.add("bad/j", f"{number}/1", [b"body"])
        failed.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(5):
            nursery.start_soon(add, number)

    assert sorted(failed) == [0, 1, 2, 3, 4]


async def test_many_puts_at_once_are_all_stored(engine: EmbeddedEngine, data_dir: Path) -> None:
    async with trio.open_nursery() as nursery:
        for number in range(200):
            nursery.start_soon(engine.blobs.put, f"jobs/j/{number}/1", [b"%d" % number])

    bodies = {path.name: path.read_bytes() for path in (data_dir / "blobs/jobs/j").iterdir()}
    assert bodies == {f"{number},1": b"%d" % number for number in range(200)}


async def test_a_cancelled_put_leaves_no_temporary_file(
    engine: EmbeddedEngine, data_dir: Path
) -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        await engine.blobs.put("jobs/j/a/b", [b"body"])

    await engine.blobs.put("jobs/j/a/c", [b"body"])
    assert list((data_dir / "temp").iterdir()) == []
