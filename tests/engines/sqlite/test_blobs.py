"""Bodies as files: where they are stored, and what is left after failures."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from random import Random

import pytest
import trio
import trio.testing

from conveyor.engines.sqlite import EmbeddedEngine, open_engine
from conveyor.engines.sqlite.pack_files import REST_S
from conveyor.ports.errors import BlobMissing, StorageDamaged, Unavailable
from conveyor.simulation.faults.faults import Faults
from conveyor.simulation.virtual_executor import VirtualExecutor
from tests.builders import ManualClock


@pytest.fixture
async def engine(data_dir: Path, clock: ManualClock) -> AsyncIterator[EmbeddedEngine]:
    async with open_engine(data_dir, clock=clock, random=Random(1), owner="test") as engine:
        yield engine


async def test_bodies_of_a_run_are_stored_in_one_directory(
    engine: EmbeddedEngine, data_dir: Path
) -> None:
    for task in ("one", "two"):
        await engine.blobs.put(f"jobs/j/runs/r/{task}/1", [b"body"])

    files = {str(path.relative_to(data_dir)) for path in data_dir.rglob("*,*")}
    assert files == {"blobs/jobs/j/runs/r/one,1", "blobs/jobs/j/runs/r/two,1"}


async def test_a_put_that_fails_leaves_no_file(engine: EmbeddedEngine, data_dir: Path) -> None:
    (data_dir / "blobs" / "jobs").write_bytes(b"in the way")

    with pytest.raises(Unavailable):
        await engine.blobs.put("jobs/j/a/b", [b"body"])

    assert list((data_dir / "temp").iterdir()) == []


async def test_a_put_that_fails_does_not_affect_concurrent_puts(
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


async def test_every_add_of_a_group_fails_if_its_pack_cannot_be_created(
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


async def test_many_concurrent_puts_are_all_stored(engine: EmbeddedEngine, data_dir: Path) -> None:
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


def _open_files(data_dir: Path) -> list[str]:
    """The files under the directory that this process has open, including deleted ones."""
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    targets = [os.readlink(link) for link in links if os.path.lexists(link)]
    return [target for target in targets if target.startswith(f"{data_dir}/blobs/")]


async def test_a_deleted_pack_is_not_held_open_by_this_process(
    engine: EmbeddedEngine, data_dir: Path
) -> None:
    await engine.blobs.add("jobs/j/runs/r", "task.1", [b"body"])
    await engine.blobs.add("jobs/other/runs/r", "task.1", [b"body"])
    before = len(_open_files(data_dir))

    await engine.blobs.delete_prefix("jobs/j")

    assert before == 2
    assert [path.partition("/jobs/")[2][:5] for path in _open_files(data_dir)] == ["other"]


async def test_a_pack_that_is_deleted_during_a_write_is_closed_after_it(
    engine: EmbeddedEngine, data_dir: Path
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.blobs.add, "jobs/j/runs/r", "task.1", [b"body"])
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(engine.blobs.delete_prefix, "jobs/j")

    assert _open_files(data_dir) == []


async def test_a_pack_without_new_bodies_is_closed_and_can_still_be_read(
    data_dir: Path, clock: ManualClock, autojump_clock: trio.testing.MockClock
) -> None:
    """The space is freed after this process or another has deleted the pack."""
    async with open_engine(
        data_dir,
        clock=clock,
        random=Random(1),
        owner="test",
        executor=VirtualExecutor(Faults({}, Random(1)), Random(1)),
    ) as engine:
        stored = await engine.blobs.add("jobs/j/runs/r", "task.1", [b"body"])
        held = len(_open_files(data_dir))

        await trio.sleep(2 * REST_S + 1)

        assert (held, _open_files(data_dir)) == (1, [])
        again = await engine.blobs.add("jobs/j/runs/r", "task.2", [b"more"])
        bodies = [
            b"".join([piece async for piece in engine.blobs.open(key)])
            for key in (stored.key, again.key)
        ]
        assert bodies == [b"body", b"more"]


async def test_a_pack_that_gets_bodies_is_not_closed(
    data_dir: Path, clock: ManualClock, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_engine(
        data_dir,
        clock=clock,
        random=Random(1),
        owner="test",
        executor=VirtualExecutor(Faults({}, Random(1)), Random(1)),
    ) as engine:
        for number in range(20):
            await engine.blobs.add("jobs/j/runs/r", f"task.{number}", [b"body"])
            await trio.sleep(REST_S / 2)

        assert len(list((data_dir / "blobs/jobs/j/runs/r").iterdir())) == 1


@pytest.mark.parametrize("left", [0, 3])
async def test_a_truncated_packed_body_is_damaged(
    engine: EmbeddedEngine, data_dir: Path, left: int
) -> None:
    stored = await engine.blobs.add("jobs/j/runs/r", "task.1", [b"body"])
    (pack,) = (data_dir / "blobs/jobs/j/runs/r").iterdir()
    os.truncate(pack, left)

    with pytest.raises(StorageDamaged, match="too few"):
        _ = [piece async for piece in engine.blobs.open(stored.key)]


async def test_reading_any_part_of_a_packed_body_reports_no_damage(engine: EmbeddedEngine) -> None:
    stored = await engine.blobs.add("jobs/j/runs/r", "task.1", [b"body"])
    empty = await engine.blobs.add("jobs/j/runs/r", "task.2", [])

    parts = [
        b"".join([piece async for piece in engine.blobs.open(key, start=start)])
        for key, start in ((stored.key, 2), (stored.key, 4), (empty.key, 0))
    ]

    assert parts == [b"dy", b"", b""]


async def test_a_body_is_not_added_to_a_pack_that_was_removed_from_outside(
    engine: EmbeddedEngine, data_dir: Path
) -> None:
    await engine.blobs.add("jobs/j/runs/r", "first", (b"one",))
    shutil.rmtree(data_dir / "blobs" / "jobs")

    with pytest.raises(Unavailable):
        await engine.blobs.add("jobs/j/runs/r", "second", (b"two",))
    stored = await engine.blobs.add("jobs/j/runs/r", "second", (b"two",))

    async with aclosing(engine.blobs.open(stored.key)) as pieces:
        assert b"".join([piece async for piece in pieces]) == b"two"


async def test_a_missing_blobs_folder_raises_unavailable_and_is_not_created_again(
    engine: EmbeddedEngine, data_dir: Path
) -> None:
    (data_dir / "blobs").rename(data_dir / "unmounted")

    with pytest.raises(Unavailable):
        await engine.blobs.add("jobs/j/runs/r", "first", (b"one",))

    assert not (data_dir / "blobs").exists()


async def test_without_their_folder_bodies_are_neither_missing_nor_deleted(
    engine: EmbeddedEngine, data_dir: Path
) -> None:
    """The volume may not be mounted; its bodies can be read again once it is."""
    await engine.blobs.put("jobs/j/a", [b"body"])
    packed = await engine.blobs.add("jobs/j/runs/r", "b", [b"packed"])
    (data_dir / "blobs").rename(data_dir / "elsewhere")

    for key in ("jobs/j/a", packed.key):
        with pytest.raises(Unavailable):
            await _body(engine, key)
    with pytest.raises(Unavailable):
        await engine.blobs.copy("jobs/j/a", "jobs/j/c")
    with pytest.raises(Unavailable):
        await engine.blobs.delete_prefix("jobs/j")
    (data_dir / "elsewhere").rename(data_dir / "blobs")

    assert await _body(engine, "jobs/j/a") == b"body"
    assert await engine.blobs.delete_prefix("jobs/j") > 0
    with pytest.raises(BlobMissing):
        await _body(engine, "jobs/j/a")


async def _body(engine: EmbeddedEngine, key: str) -> bytes:
    async with aclosing(engine.blobs.open(key)) as pieces:
        return b"".join([piece async for piece in pieces])
