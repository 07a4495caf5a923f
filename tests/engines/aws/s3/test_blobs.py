"""Blobs on S3: presigned URLs, multipart uploads, partly failed deletions, and concurrent
copies."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from random import Random
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
import trio

from conveyor.engines.aws import s3 as module
from conveyor.engines.aws.client.auth import StaticAccess
from conveyor.engines.aws.client.client import RetryingAwsClient
from conveyor.engines.aws.client.http_transport import HttpTransport
from conveyor.engines.aws.errors import AwsError
from conveyor.engines.aws.s3 import S3Blobs
from conveyor.engines.aws_signature import Credentials
from conveyor.engines.system import SystemClock
from conveyor.ports.blobs import Stored
from conveyor.ports.errors import BlobTooLarge, Unavailable
from tests.aws import REGION, an_aws_client, an_http_transport
from tests.builders import ManualClock
from tests.conformance.bodies import BUCKET, s3_blobs
from tests.engines.aws.scripted import LOST, ScriptedAnswer, ScriptedTransport

KEY = "inputs/1/list"
PART = b"0123456789abcdef" * (512 * 1024)


@pytest.fixture
async def blobs(seaweed: str) -> AsyncIterator[S3Blobs]:
    async with s3_blobs(seaweed) as blobs:
        yield blobs


@pytest.fixture
def web() -> Iterator[httpx.Client]:
    with httpx.Client(trust_env=False) as client:
        yield client


async def read(blobs: S3Blobs, key: str) -> bytes:
    async with aclosing(blobs.open(key)) as pieces:
        return b"".join([piece async for piece in pieces])


async def stream(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        await trio.lowlevel.checkpoint()
        yield piece


async def an_upload_url(blobs: S3Blobs, *, lives_s: float = 60) -> str:
    expires_at = SystemClock().now() + lives_s
    url = await blobs.upload_url(KEY, content_type="text/csv", expires_at=expires_at)
    assert url is not None
    return url


CSV = {"Content-Type": "text/csv"}


@pytest.mark.slow
async def test_a_list_is_uploaded_to_a_presigned_url(blobs: S3Blobs, web: httpx.Client) -> None:
    url = await an_upload_url(blobs)

    first = web.put(url, content=b"first", headers=CSV)
    again = web.put(url, content=b"second", headers=CSV)

    assert (first.status_code, again.status_code) == (200, 200)
    stored = await blobs.copy(KEY, "sources/1/2/0")
    assert stored.sha256 == hashlib.sha256(b"second").hexdigest()


@pytest.mark.slow
async def test_an_upload_url_is_valid_for_one_key_method_and_content_type(
    blobs: S3Blobs, web: httpx.Client
) -> None:
    url = await an_upload_url(blobs)
    elsewhere = url.replace(KEY, "inputs/2/list")

    refused = [
        web.put(url, content=b"list", headers={"Content-Type": "text/html"}),
        web.put(url, content=b"list"),
        web.put(elsewhere, content=b"list", headers=CSV),
        web.get(url, headers=CSV),
        web.delete(url, headers=CSV),
    ]

    assert [answer.status_code for answer in refused] == [403] * 5
    assert await blobs.delete_prefix("inputs") == 0


@pytest.mark.slow
async def test_a_body_is_downloaded_from_a_presigned_url_as_the_requested_file(
    blobs: S3Blobs, web: httpx.Client
) -> None:
    await blobs.put(KEY, [b"<p>body"])

    url = await blobs.download_url(
        KEY,
        content_type="text/html; charset=utf-8",
        filename="abc.html",
        expires_at=SystemClock().now() + 60,
    )
    assert url is not None
    whole = web.get(url)
    part = web.get(url, headers={"Range": "bytes=3-"})

    assert (whole.status_code, whole.content) == (200, b"<p>body")
    assert whole.headers["Content-Type"] == "text/html; charset=utf-8"
    assert whole.headers["Content-Disposition"] == 'attachment; filename="abc.html"'
    assert (part.status_code, part.content) == (206, b"body")
    assert web.put(url, content=b"other").status_code == 403


@pytest.mark.slow
async def test_an_object_of_several_parts_is_read_as_it_was_streamed(blobs: S3Blobs) -> None:
    body = PART + PART + b"tail"

    stored = await blobs.put_stream(KEY, stream(PART[:100], PART[100:] + PART, b"tail"))

    assert stored == Stored(KEY, len(body), hashlib.sha256(body).hexdigest())
    assert await read(blobs, KEY) == body


@pytest.mark.slow
async def test_a_stream_that_fails_in_its_second_part_leaves_no_open_upload(
    blobs: S3Blobs,
) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield PART
        yield PART
        raise ConnectionError

    with pytest.raises(ConnectionError):
        await blobs.put_stream(KEY, broken())

    assert await blobs.delete_prefix("inputs") == 0
    calls = _meter_of(blobs).calls
    assert (calls["s3.UploadPart"], calls["s3.AbortMultipartUpload"]) == (2, 1)


@pytest.mark.slow
async def test_a_cancelled_stream_leaves_no_open_upload(blobs: S3Blobs) -> None:
    scope = trio.CancelScope()

    async def cancelled_stream() -> AsyncGenerator[bytes, None]:
        yield PART
        scope.cancel()
        yield PART

    async with aclosing(cancelled_stream()) as pieces:
        with scope:
            await blobs.put_stream(KEY, pieces)

    assert await blobs.delete_prefix("inputs") == 0
    assert _meter_of(blobs).calls["s3.AbortMultipartUpload"] == 1


@pytest.mark.slow
async def test_more_bodies_than_one_listing_returns_are_all_deleted(
    blobs: S3Blobs,
) -> None:
    limiter = trio.CapacityLimiter(32)

    async def put(number: int) -> None:
        async with limiter:
            await blobs.put(f"jobs/1/{number}", [b"body"])

    async with trio.open_nursery() as nursery:
        for number in range(1005):
            nursery.start_soon(put, number)

    assert await blobs.delete_prefix("jobs/1") == 1005
    assert await blobs.delete_prefix("jobs/1") == 0


@pytest.mark.slow
async def test_puts_parts_copies_and_deletions_work_on_moto_too(moto: str) -> None:
    async with s3_blobs(moto) as blobs:
        body = await blobs.add("jobs/1/runs/2", "task.1", [b"body"])
        stored = await blobs.put_stream("jobs/1/exports/2/file", stream(PART, b"tail"))
        copied = await blobs.copy("jobs/1/exports/2/file", "jobs/2/file")

        assert (copied.size_bytes, copied.sha256) == (stored.size_bytes, stored.sha256)
        assert await read(blobs, body.key) == b"body"
        assert await blobs.delete_prefix("jobs/1") == 2
        assert await read(blobs, "jobs/2/file") == PART + b"tail"


def _meter_of(blobs: S3Blobs) -> Any:
    assert isinstance(blobs.client, RetryingAwsClient)
    return blobs.client.meter


def scripted(*lines: ScriptedAnswer) -> tuple[S3Blobs, ScriptedTransport]:
    transport = ScriptedTransport(*lines)
    return _blobs_over(transport), transport


def _blobs_over(transport: Any, clock: ManualClock | None = None) -> S3Blobs:
    return S3Blobs(
        client=an_aws_client(transport),
        presigner=transport,
        clock=clock or ManualClock(),
        random=Random(1),
        bucket=BUCKET,
    )


LISTED = {"IsTruncated": False, "Contents": [{"Key": "a/1"}, {"Key": "a/2"}, {"Key": "a/3"}]}
SLOW = {"Errors": [{"Key": "a/2", "Code": "SlowDown", "Message": "later"}]}


async def test_objects_that_a_deletion_left_out_are_deleted_again(autojump_clock: object) -> None:
    blobs, transport = scripted(LISTED, SLOW, {})

    assert await blobs.delete_prefix("a") == 3

    deleted = [
        params["Delete"]["Objects"] for _, name, params in transport.asked if "Delete" in name
    ]
    assert deleted == [[{"Key": "a/1"}, {"Key": "a/2"}, {"Key": "a/3"}], [{"Key": "a/2"}]]


async def test_a_deletion_that_keeps_failing_raises_unavailable(autojump_clock: object) -> None:
    blobs, _ = scripted(LISTED, SLOW)

    with pytest.raises(Unavailable, match="SlowDown"):
        await blobs.delete_prefix("a")


async def test_a_denied_deletion_names_the_permission(autojump_clock: object) -> None:
    denied = {"Errors": [{"Key": "a/2", "Code": "AccessDenied", "Message": "Access Denied"}]}
    blobs, _ = scripted(LISTED, denied)

    with pytest.raises(Unavailable, match="missing permission: s3:DeleteObject"):
        await blobs.delete_prefix("a")


async def test_a_put_with_a_lost_answer_is_repeated(autojump_clock: object) -> None:
    blobs, transport = scripted(LOST, {"ETag": '"1"'})

    await blobs.put(KEY, [b"body"])

    assert [name for _, name, _ in transport.asked] == ["PutObject", "PutObject"]


async def test_an_upload_whose_last_answer_is_lost_raises_unavailable(
    autojump_clock: object,
) -> None:
    part = {"ETag": '"1"'}
    blobs, transport = scripted({"UploadId": "u"}, part, part, LOST, {})

    with pytest.raises(Unavailable):
        await blobs.put_stream(KEY, stream(PART, PART))

    assert [name for _, name, _ in transport.asked][-2:] == [
        "CompleteMultipartUpload",
        "AbortMultipartUpload",
    ]


async def a_body(text: bytes) -> AsyncIterator[bytes]:
    yield text


async def test_a_copy_is_repeated_if_its_source_was_replaced_meanwhile() -> None:
    copied = {"CopyObjectResult": {"ETag": '"1"'}}
    replaced = AwsError("PreconditionFailed", "another", status=412)
    blobs, transport = scripted(copied, replaced, copied, {"Body": a_body(b"list")})

    stored = await blobs.copy(KEY, "jobs/1/list")

    assert stored == Stored("jobs/1/list", 4, hashlib.sha256(b"list").hexdigest())
    assert [name for _, name, _ in transport.asked] == ["CopyObject", "GetObject"] * 2
    assert transport.asked[-1][2]["IfMatch"] == '"1"'


async def test_a_body_that_is_too_large_is_neither_copied_nor_read() -> None:
    blobs, transport = scripted({"ContentLength": 5})

    with pytest.raises(BlobTooLarge):
        await blobs.copy(KEY, "jobs/1/list", bytes_max=4)

    assert [name for _, name, _ in transport.asked] == ["HeadObject"]


async def test_a_body_that_grows_before_it_is_copied_is_not_read_to_its_end() -> None:
    read = []

    async def endless() -> AsyncIterator[bytes]:
        while True:
            read.append(4)
            yield b"list"

    copied = {"CopyObjectResult": {"ETag": '"1"'}}
    blobs, transport = scripted({"ContentLength": 4}, copied, {"Body": endless()}, {})

    with pytest.raises(BlobTooLarge):
        await blobs.copy(KEY, "jobs/1/list", bytes_max=9)

    assert sum(read) == 12
    assert [name for _, name, _ in transport.asked][-1] == "DeleteObject"


@pytest.mark.parametrize(("keys_live_s", "expected"), [(None, 900), (3600, 900), (300, 300)])
async def test_a_presigned_url_expires_no_later_than_the_credentials_that_sign_it(
    keys_live_s: float | None, expected: int
) -> None:
    clock = ManualClock()
    until = None if keys_live_s is None else clock.now() + keys_live_s
    keys = Credentials("AKIA", "secret", "token", until)
    access = StaticAccess(REGION, keys, {"s3": "https://s3.us-east-1.amazonaws.com"})
    async with an_http_transport(access) as transport:
        still = HttpTransport(access=access, pool=transport.pool, now=clock.now)
        url = await _blobs_over(still, clock).download_url(
            KEY, content_type="text/plain", filename="a.txt", expires_at=clock.now() + 900
        )

    assert url is not None
    assert parse_qs(urlsplit(url).query)["X-Amz-Expires"] == [str(expected)]


def test_the_growing_part_size_allows_hundreds_of_gibibytes_in_ten_thousand_parts() -> None:
    sizes = [module._part_bytes(number) for number in range(10_000)]

    assert min(sizes) >= 5 * 1024**2
    assert max(sizes) <= 5 * 1024**3
    assert sum(sizes) > 400 * 1024**3
