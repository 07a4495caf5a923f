"""The laws of Blobs that uploads need (streams and copies, docs/storage.md, Blob keys), and the
query for expired upload slots."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
import trio

from conveyor.domain.queries import ExpiredInputs
from conveyor.ports.blobs import Blobs, Stored
from conveyor.ports.errors import BlobMissing, BlobTooLarge
from conveyor.ports.store import Store
from tests.builders import T0, an_input, keep

KEY, COPY = "inputs/1/list", "sources/1/2/0"
BIG = bytes(range(256)) * 4096


async def _read(blobs: Blobs, key: str) -> bytes:
    async with aclosing(blobs.open(key)) as parts:
        return b"".join([part async for part in parts])


async def _stream(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        await trio.lowlevel.checkpoint()
        yield piece


@pytest.mark.parametrize("pieces", [(), (b"",), (b"a", b"", b"bc"), (BIG, BIG, b"tail")])
async def test_a_stream_is_stored_as_its_joined_pieces(
    blobs: Blobs, pieces: tuple[bytes, ...]
) -> None:
    body = b"".join(pieces)

    stored = await blobs.put_stream(KEY, _stream(*pieces))

    assert stored == Stored(KEY, len(body), hashlib.sha256(body).hexdigest())
    assert await _read(blobs, KEY) == body


async def test_a_stream_that_fails_stores_nothing(blobs: Blobs) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield BIG
        raise ConnectionError

    await blobs.put_stream(KEY, _stream(b"old"))

    with pytest.raises(ConnectionError):
        await blobs.put_stream(KEY, broken())
    with pytest.raises(ConnectionError):
        await blobs.put_stream(f"{KEY}2", broken())

    assert await _read(blobs, KEY) == b"old"
    with pytest.raises(BlobMissing):
        await _read(blobs, f"{KEY}2")


async def test_no_reader_sees_a_part_of_a_stream(blobs: Blobs) -> None:
    seen = []

    async def slow() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield BIG
            seen.append(await _read(blobs, KEY))

    await blobs.put_stream(KEY, _stream(b"old"))
    await blobs.put_stream(KEY, slow())

    assert seen == [b"old"] * 3
    assert await _read(blobs, KEY) == BIG * 3


async def test_a_copy_is_independent_of_its_original(blobs: Blobs) -> None:
    await blobs.put_stream(KEY, _stream(b"first"))

    stored = await blobs.copy(KEY, COPY)
    await blobs.put_stream(KEY, _stream(b"second"))
    other = await blobs.copy(KEY, f"{COPY}1")
    await blobs.delete_prefix("inputs/1")

    assert stored == Stored(COPY, 5, hashlib.sha256(b"first").hexdigest())
    assert await _read(blobs, COPY) == b"first"
    assert (other.size_bytes, await _read(blobs, f"{COPY}1")) == (6, b"second")


async def test_removing_a_copy_leaves_the_original(blobs: Blobs) -> None:
    await blobs.put(KEY, [b"body"])
    await blobs.copy(KEY, COPY)

    await blobs.delete_prefix("sources/1")

    assert await _read(blobs, KEY) == b"body"


async def test_copying_again_replaces_the_copy(blobs: Blobs) -> None:
    await blobs.put(KEY, [b"first"])
    await blobs.copy(KEY, COPY)
    again = await blobs.copy(KEY, COPY)
    await blobs.put(KEY, [b"second"])

    await blobs.copy(KEY, COPY)

    assert again.size_bytes == 5
    assert await _read(blobs, COPY) == b"second"


async def test_a_body_larger_than_allowed_is_not_copied(blobs: Blobs) -> None:
    await blobs.put_stream(KEY, _stream(BIG))

    with pytest.raises(BlobTooLarge):
        await blobs.copy(KEY, COPY, bytes_max=len(BIG) - 1)
    with pytest.raises(BlobMissing):
        await _read(blobs, COPY)

    assert (await blobs.copy(KEY, COPY, bytes_max=len(BIG))).size_bytes == len(BIG)


async def test_copying_a_missing_body_raises_blob_missing(blobs: Blobs) -> None:
    with pytest.raises(BlobMissing):
        await blobs.copy(KEY, COPY)
    with pytest.raises(BlobMissing):
        await blobs.copy(KEY, COPY, bytes_max=1)
    with pytest.raises(BlobMissing):
        await _read(blobs, COPY)


@pytest.mark.parametrize("key", ["", "../a", "a//b", "a b"])
async def test_streams_copies_and_urls_accept_plain_keys_only(blobs: Blobs, key: str) -> None:
    await blobs.put(KEY, [b"body"])

    with pytest.raises(ValueError, match=r"\S"):
        await blobs.put_stream(key, _stream(b"body"))
    with pytest.raises(ValueError, match=r"\S"):
        await blobs.copy(KEY, key)
    with pytest.raises(ValueError, match=r"\S"):
        await blobs.copy(key, KEY)
    with pytest.raises(ValueError, match=r"\S"):
        await blobs.upload_url(key, content_type="text/csv", expires_at=T0)
    with pytest.raises(ValueError, match=r"\S"):
        await blobs.download_url(key, content_type="text/csv", filename="a", expires_at=T0)


async def test_expired_upload_slots_are_found_oldest_first(store: Store) -> None:
    slots = [an_input(9 - number, expires_at=T0 + number) for number in range(4)]
    await keep(store, *slots)

    assert await store.find(ExpiredInputs(expired_by=T0 + 2, limit=10)) == slots[:3]
    assert await store.find(ExpiredInputs(expired_by=T0 + 2, limit=2)) == slots[:2]
    assert await store.find(ExpiredInputs(expired_by=T0 - 1, limit=2)) == []
