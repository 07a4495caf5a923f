"""HttpExportSink: complete files are uploaded to buckets and presigned URLs, and nowhere else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import botocore.session
import pytest

from conveyor.domain.export_record import Destination
from conveyor.domain.submit.target import TargetPolicy
from conveyor.engines.http.export_sink import HttpExportSink
from conveyor.engines.system import SystemClock
from conveyor.http_client.connection_limits import PoolLimits
from conveyor.http_client.pool import HttpPool
from conveyor.ports.export_sink import OutgoingFile
from conveyor.ports.webhook_sender import Delivered, NotDelivered
from tests.aws import REGION
from tests.servers import ACCESS_KEY, SECRET_KEY

FILE = b"a file of several pieces, " * 4000


async def pieces() -> AsyncIterator[bytes]:
    for start in range(0, len(FILE), 10_000):
        yield FILE[start : start + 10_000]


async def put(destination: Destination, *, allow_private: bool = True) -> Delivered | NotDelivered:
    pool = HttpPool(TargetPolicy(allow_private=allow_private), PoolLimits())
    try:
        sink = HttpExportSink(pool, now=SystemClock().now)
        return await sink.put(
            OutgoingFile(
                destination=destination,
                partition="a caller",
                content_type="text/csv",
                size_bytes=len(FILE),
                pieces=pieces(),
            )
        )
    finally:
        pool.close()


@pytest.fixture
def s3(moto: str) -> Any:
    client = botocore.session.Session().create_client(
        "s3",
        endpoint_url=moto,
        region_name=REGION,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
    )
    client.create_bucket(Bucket="exports")
    return client


async def test_a_file_is_uploaded_to_a_bucket_and_to_a_presigned_url(moto: str, s3: Any) -> None:
    signed = s3.generate_presigned_url(
        "put_object", Params={"Bucket": "exports", "Key": "by/url"}, ExpiresIn=60
    )
    by_keys = Destination(
        f"{moto}/exports/by%20keys/%C3%A9",
        region=REGION,
        access_key=ACCESS_KEY,
        secret_key=SECRET_KEY,
    )

    assert await put(Destination(signed)) == Delivered(200)
    assert await put(by_keys) == Delivered(200)
    assert await put(by_keys) == Delivered(200)

    for key in ("by/url", "by keys/é"):
        found = s3.get_object(Bucket="exports", Key=key)
        assert found["Body"].read() == FILE
        assert found["ContentType"] == "text/csv"


async def test_a_refused_upload_reports_its_status_and_no_secret(moto: str, s3: Any) -> None:
    missing = Destination(f"{moto}/no-such-bucket/key?X-Amz-Signature=private")

    outcome = await put(missing)

    assert outcome == NotDelivered("http_4xx:404", 404)
    assert "private" not in repr(missing)


@pytest.mark.parametrize(
    "url",
    [
        "https://127.0.0.1/bucket/key",
        "https://169.254.169.254/latest/key",
        "https://localhost/bucket/key",
        "https://[::ffff:10.0.0.1]/bucket/key",
    ],
)
async def test_no_connection_is_made_to_a_private_address(url: str) -> None:
    outcome = await put(Destination(url), allow_private=False)

    assert isinstance(outcome, NotDelivered)
    assert outcome.error.startswith("transport_error:the target is")


async def test_plain_http_is_refused() -> None:
    outcome = await put(Destination("http://example.com/key"), allow_private=False)

    assert outcome == NotDelivered("transport_error:https is required")
