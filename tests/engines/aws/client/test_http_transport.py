"""The HTTP transport with answers that no emulator gives."""

from __future__ import annotations

import zlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from email.utils import formatdate

import pytest

from conveyor.engines.aws.errors import NoResponse, NotAllowed
from conveyor.ports.errors import Unavailable
from tests.aws import an_access, an_aws_client, an_http_transport
from tests.http_client.server import Handler, Peer, answering, raw_server, reply

LONG_AGO = 1_000_000_000
SKEWED = reply(
    b'{"__type":"com.amazon.coral.service#InvalidSignatureException","message":"not yet current"}',
    status="400 Bad Request",
    headers={"Date": formatdate(LONG_AGO, usegmt=True)},
)


def dated(request: bytes) -> bytes:
    return request.lower().partition(b"x-amz-date: ")[2][:8]


async def test_a_wrong_clock_is_corrected_by_the_answer(autojump_clock: object) -> None:
    async with (
        raw_server(answering(SKEWED, reply(b"{}"))) as server,
        an_http_transport(an_access(dynamodb=server.url())) as transport,
    ):
        answer = await an_aws_client(transport).call("dynamodb", "ListTables", {})

    assert answer == {}
    assert dated(server.requests[1]) == b"20010909"


async def test_a_request_refused_for_its_signature_at_the_right_time_is_not_repeated() -> None:
    body = b'{"__type":"x#InvalidSignatureException","message":"no"}'
    async with (
        raw_server(answering(reply(body, status="400 Bad Request"))) as server,
        an_http_transport(an_access(dynamodb=server.url())) as transport,
    ):
        with pytest.raises(NotAllowed, match="InvalidSignatureException"):
            await an_aws_client(transport).call("dynamodb", "ListTables", {})

    assert len(server.requests) == 1


async def test_an_answer_that_fails_its_checksum_raises_unavailable() -> None:
    damaged = reply(b"{}", headers={"x-amz-crc32": str(zlib.crc32(b"{}") ^ 1)})
    async with (
        raw_server(answering(damaged)) as server,
        an_http_transport(an_access(dynamodb=server.url())) as transport,
    ):
        with pytest.raises(NoResponse, match="damaged"):
            await transport.call("dynamodb", "ListTables", {}, deadline_s=5.0)


async def test_an_upload_that_failed_after_a_200_has_an_unknown_outcome() -> None:
    late = b"<Error><Code>InternalError</Code><Message>sorry</Message></Error>"
    async with (
        raw_server(answering(reply(late))) as server,
        an_http_transport(an_access(s3=server.url())) as transport,
    ):
        params = {"Bucket": "b", "Key": "k", "UploadId": "u", "MultipartUpload": {"Parts": []}}
        with pytest.raises(Unavailable, match="InternalError"):
            await an_aws_client(transport).call("s3", "CompleteMultipartUpload", params)

    assert len(server.requests) == 1


def hanging_up() -> Handler:
    async def handler(peer: Peer) -> None:
        await peer.request()

    return handler


async def test_a_connection_lost_after_the_request_leaves_the_outcome_unknown() -> None:
    async with (
        raw_server(hanging_up()) as server,
        an_http_transport(an_access(dynamodb=server.url())) as transport,
    ):
        with pytest.raises(Unavailable):
            await an_aws_client(transport).call("dynamodb", "UpdateItem", {})

    assert len(server.requests) == 1


async def test_a_request_to_an_unreachable_server_was_certainly_not_sent() -> None:
    async with raw_server(hanging_up()) as gone:
        pass
    async with an_http_transport(an_access(dynamodb=gone.url())) as transport:
        with pytest.raises(NoResponse) as caught:
            await transport.call("dynamodb", "UpdateItem", {}, deadline_s=5.0)

    assert not caught.value.was_sent


async def test_a_connection_is_closed_if_its_body_is_not_read_to_the_end() -> None:
    async with (
        raw_server(answering(reply(b"x" * 300_000))) as server,
        an_http_transport(an_access(s3=server.url())) as transport,
    ):
        at = {"Bucket": "b", "Key": "k"}
        async with transport.open("s3", "GetObject", at, deadline_s=5.0) as answer:
            await anext(answer["Body"])
            await answer["Body"].aclose()

        assert transport.pool.idle_count == 0


async def test_a_connection_is_kept_if_its_body_is_read_to_the_end() -> None:
    async with (
        raw_server(answering(reply(b"x" * 300_000))) as server,
        an_http_transport(an_access(s3=server.url())) as transport,
    ):
        at = {"Bucket": "b", "Key": "k"}
        async with transport.open("s3", "GetObject", at, deadline_s=5.0) as answer:
            pieces = [piece async for piece in answer["Body"]]

        assert sum(map(len, pieces)) == transport.traffic.received_bytes == 300_000
        assert transport.pool.idle_count == 1


@pytest.mark.parametrize("announced", [3, 7])
async def test_a_body_of_another_length_than_announced_is_an_error(
    announced: int,
) -> None:
    async def five() -> AsyncGenerator[bytes, None]:
        yield b"12345"

    async with (
        raw_server(answering(reply())) as server,
        an_http_transport(an_access(s3=server.url())) as transport,
        aclosing(five()) as body,
    ):
        params = {"Bucket": "b", "Key": "k", "Body": body, "ContentLength": announced}
        with pytest.raises(NoResponse, match="announced"):
            await transport.call("s3", "PutObject", params, deadline_s=5.0)

        assert transport.pool.idle_count == 0


@pytest.mark.parametrize(
    ("endpoint", "bucket", "url"),
    [
        ("https://s3.eu-west-1.amazonaws.com", "b", "https://b.s3.eu-west-1.amazonaws.com/k/1?"),
        (
            "https://s3.eu-west-1.amazonaws.com",
            "b.c",
            "https://s3.eu-west-1.amazonaws.com/b.c/k/1?",
        ),
        ("http://127.0.0.1:8333", "b", "http://127.0.0.1:8333/b/k/1?"),
    ],
)
async def test_a_bucket_is_part_of_the_host_name_if_certificates_allow_it(
    endpoint: str, bucket: str, url: str
) -> None:
    async with an_http_transport(an_access(s3=endpoint)) as transport:
        signed = await transport.presign(
            "GetObject", {"Bucket": bucket, "Key": "k/1"}, expires_s=60
        )

    assert signed.startswith(url)
