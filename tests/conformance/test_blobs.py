"""The laws of Blobs: a body is whole or absent and replaced as a whole, and keys are plain
(docs/storage.md, Blob keys)."""

from __future__ import annotations

import hashlib
from contextlib import aclosing

import pytest
import trio
import trio.testing

from conveyor.ports.blobs import Blobs, Stored
from conveyor.ports.errors import BlobMissing
from tests.builders import JOB, RUN, a_task

KEY = f"jobs/{JOB}/runs/{RUN}/{a_task().task_id}/1"
BIG = bytes(range(256)) * 2048


async def _read(blobs: Blobs, key: str, *, start: int = 0) -> bytes:
    async with aclosing(blobs.open(key, start=start)) as parts:
        return b"".join([part async for part in parts])


async def _exists(blobs: Blobs, key: str) -> bool:
    try:
        await _read(blobs, key)
    except BlobMissing:
        return False
    return True


SMALL = b"x" * 20_000


@pytest.mark.parametrize(
    "parts",
    [[b"body"], [b"bo", b"", b"dy"], [], [b""], [b"\x00\r\n\xff"], [BIG, b"tail"], [BIG] * 9],
    ids=["one", "several", "none", "empty", "binary", "big", "huge"],
)
async def test_an_added_body_is_opened_by_the_returned_key(
    blobs: Blobs, parts: list[bytes]
) -> None:
    body = b"".join(parts)
    await blobs.add("jobs/j", "before", [b"before"])

    stored = await blobs.add("jobs/j", "name", parts)
    await blobs.add("jobs/j", "after", [b"after"])

    assert (stored.size_bytes, stored.sha256) == (len(body), hashlib.sha256(body).hexdigest())
    assert stored.key.startswith("jobs/j/")
    assert await _read(blobs, stored.key) == body
    assert await _read(blobs, stored.key, start=2) == body[2:]


async def test_bodies_that_are_added_concurrently_do_not_mix(blobs: Blobs) -> None:
    keys: dict[int, str] = {}

    async def add(number: int) -> None:
        stored = await blobs.add(f"jobs/{number % 3}", str(number), [SMALL, str(number).encode()])
        keys[number] = stored.key

    async with trio.open_nursery() as nursery:
        for number in range(200):
            nursery.start_soon(add, number)

    assert len(set(keys.values())) == 200
    for number, key in keys.items():
        assert await _read(blobs, key) == SMALL + str(number).encode()


async def test_a_cancelled_add_does_not_damage_concurrent_adds(blobs: Blobs) -> None:
    stored: dict[int, Stored] = {}

    async def add(number: int) -> None:
        stored[number] = await blobs.add("jobs/j", str(number), [SMALL, str(number).encode()])

    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as first:
            async with trio.open_nursery() as cancelled:
                cancelled.start_soon(add, 0)
                await trio.testing.wait_all_tasks_blocked()
                for number in range(1, 10):
                    nursery.start_soon(add, number)
                await trio.lowlevel.checkpoint()
                first.cancel()

    assert stored.keys() >= set(range(1, 10))
    for number, body in stored.items():
        assert await _read(blobs, body.key) == SMALL + str(number).encode()


async def test_deleting_a_prefix_removes_added_bodies_below_it(blobs: Blobs) -> None:
    deleted = await blobs.add("jobs/j", "name", [b"doomed"])
    beside = await blobs.add("jobs/jj", "name", [b"beside"])

    assert await blobs.delete_prefix("jobs/j")

    with pytest.raises(BlobMissing):
        await _read(blobs, deleted.key)
    assert await _read(blobs, beside.key) == b"beside"
    assert await blobs.delete_prefix("jobs/j") == 0


@pytest.mark.parametrize(
    "parts",
    [[b"body"], [b"bo", b"", b"dy"], [], [b""], [b"\x00\r\n\xff"], [BIG, b"tail"]],
    ids=["one", "several", "none", "empty", "binary", "big"],
)
async def test_a_body_is_read_as_its_joined_parts(blobs: Blobs, parts: list[bytes]) -> None:
    body = b"".join(parts)

    stored = await blobs.put(KEY, parts)

    assert stored == Stored(KEY, len(body), hashlib.sha256(body).hexdigest())
    assert await _read(blobs, KEY) == body


@pytest.mark.parametrize(
    "start", [0, 1, 65_535, 65_536, 65_537, len(BIG) - 1, len(BIG), len(BIG) + 1]
)
async def test_a_body_is_streamed_from_the_requested_byte(blobs: Blobs, start: int) -> None:
    await blobs.put(KEY, [BIG])

    assert await _read(blobs, KEY, start=start) == BIG[start:]


async def test_opening_a_key_without_a_body_raises_blob_missing(blobs: Blobs) -> None:
    await blobs.put(f"{KEY}0", [b"body"])

    with pytest.raises(BlobMissing):
        await _read(blobs, KEY)


async def test_a_prefix_of_a_key_has_no_body(blobs: Blobs) -> None:
    await blobs.put(KEY, [b"body"])

    with pytest.raises(BlobMissing):
        await _read(blobs, f"jobs/{JOB}")


async def test_a_second_put_replaces_the_body_as_a_whole(blobs: Blobs) -> None:
    await blobs.put(KEY, [b"a longer body than the next"])

    await blobs.put(KEY, [b"short"])

    assert await _read(blobs, KEY) == b"short"


async def test_a_reader_during_a_replacement_gets_one_of_the_two_bodies_as_a_whole(
    blobs: Blobs,
) -> None:
    old, new = b"a" * len(BIG), b"b" * len(BIG)
    await blobs.put(KEY, [old])

    async with aclosing(blobs.open(KEY)) as parts:
        read = await anext(parts)
        await blobs.put(KEY, [new])
        read += b"".join([part async for part in parts])

    assert read == old
    assert await _read(blobs, KEY) == new


async def test_no_reader_sees_a_part_of_a_put(blobs: Blobs) -> None:
    whole = {bytes([letter]) * 200_000 for letter in b"abc"}
    seen: set[bytes] = set()

    async def put(body: bytes) -> None:
        for _ in range(5):
            await blobs.put(KEY, [body[:70_000], body[70_000:]])

    async def read() -> None:
        for _ in range(10):
            seen.add(await _read(blobs, KEY) if await _exists(blobs, KEY) else b"")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        for body in sorted(whole):
            nursery.start_soon(put, body)

    assert seen <= whole | {b""}
    assert await _read(blobs, KEY) in whole


async def test_a_cancelled_put_leaves_the_old_body_or_the_new_one(blobs: Blobs) -> None:
    await blobs.put(KEY, [b"old"])

    with trio.CancelScope() as scope:
        scope.cancel()
        await blobs.put(KEY, [b"new"])

    assert await _read(blobs, KEY) in {b"old", b"new"}


async def test_deleting_a_prefix_removes_every_body_under_it_and_no_other(
    blobs: Blobs,
) -> None:
    under = ["jobs/1/a", "jobs/1/runs/2/b", "jobs/1/runs/3/c"]
    beside = ["jobs/10/a", "jobs/1x/a", "job/1/a", "other/jobs/1/a", "jobs/1_/a"]
    for key in [*under, *beside]:
        await blobs.put(key, [b"body"])

    count = await blobs.delete_prefix("jobs/1")

    assert count == len(under)
    assert [key for key in under if await _exists(blobs, key)] == []
    assert [key for key in beside if await _exists(blobs, key)] == beside


async def test_deleting_a_prefix_in_limited_calls_removes_everything(blobs: Blobs) -> None:
    keys = [f"jobs/1/runs/{number}/a" for number in range(5)]
    for key in keys:
        await blobs.put(key, [b"body"])

    counts = []
    while count := await blobs.delete_prefix("jobs/1", limit=2):
        counts.append(count)

    assert sum(counts) == len(keys)
    assert [key for key in keys if await _exists(blobs, key)] == []


async def test_deleting_a_prefix_keeps_a_body_whose_key_equals_the_prefix(blobs: Blobs) -> None:
    await blobs.put("jobs/1", [b"body"])

    assert await blobs.delete_prefix("jobs/1") == 0
    assert await _exists(blobs, "jobs/1")


async def test_deleting_a_prefix_without_bodies_returns_zero(blobs: Blobs) -> None:
    await blobs.put("jobs/1/a", [b"body"])

    counts = [await blobs.delete_prefix(prefix) for prefix in ("jobs/2", "jobs/1", "jobs/1")]

    assert counts == [0, 1, 0]


async def test_a_body_can_be_put_under_a_deleted_key(blobs: Blobs) -> None:
    await blobs.put("jobs/1/a/b", [b"old"])
    await blobs.delete_prefix("jobs/1")

    await blobs.put("jobs/1/a/b", [b"new"])

    assert await _read(blobs, "jobs/1/a/b") == b"new"


@pytest.mark.parametrize(
    "key", ["a", "a/b", "0/1/2", "A-z_0.9/body.html", "a..b/c.", "a" * 128, KEY]
)
async def test_relative_paths_of_plain_segments_are_keys(blobs: Blobs, key: str) -> None:
    await blobs.put(key, [b"body"])

    assert await _read(blobs, key) == b"body"


BAD_KEYS = [
    "",
    "/",
    "/a",
    "/etc/passwd",
    "a/",
    "a//b",
    ".",
    "..",
    "../a",
    "a/..",
    "a/../b",
    "a/./b",
    "./a",
    "a\x00b",
    "a/\x00",
    "a\nb",
    "a\n",
    "a\\b",
    "..\\a",
    "C:\\a",
    ".hidden",
    "a/.b",
    "a b",
    "~/a",
    "a/*",
    "é",
    "a/\ud800",
    "a" * 256,
]


@pytest.mark.parametrize("key", BAD_KEYS, ids=ascii)
async def test_other_keys_are_refused(blobs: Blobs, key: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        await blobs.put(key, [b"body"])
    with pytest.raises(ValueError, match=r"\S"):
        await _read(blobs, key)
    with pytest.raises(ValueError, match=r"\S"):
        await blobs.delete_prefix(key)
