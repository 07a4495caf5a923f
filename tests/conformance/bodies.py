"""The blob engines that the laws are tested with: one of every engine, and S3 on an emulator."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random

import pytest
import trio

from conveyor.engines.aws.client.client import AwsClient
from conveyor.engines.aws.packs import Packing
from conveyor.engines.aws.s3 import S3Blobs
from conveyor.engines.system import SystemClock
from conveyor.ports.blobs import Blobs
from tests.aws import a_boto_transport, an_access, an_aws_client, an_http_transport
from tests.builders import ManualClock
from tests.conformance.engines import ENGINES

BUCKET = "conformance"
_CREATED: set[str] = set()

OpenBlobs = Callable[[pytest.FixtureRequest, Path], AbstractAsyncContextManager[Blobs]]


@asynccontextmanager
async def _of_engine(
    name: str, request: pytest.FixtureRequest, data_dir: Path
) -> AsyncIterator[Blobs]:
    async with ENGINES[name](data_dir, ManualClock(), Random(1)) as engine:
        yield engine.blobs


@asynccontextmanager
async def _open_emulator(request: pytest.FixtureRequest, data_dir: Path) -> AsyncIterator[Blobs]:
    async with s3_blobs(request.getfixturevalue("seaweed")) as blobs:
        yield blobs


@asynccontextmanager
async def s3_blobs(url: str) -> AsyncIterator[S3Blobs]:
    """Blobs in a bucket that is empty before and after, because a server has room for few
    buckets."""
    access = an_access(s3=url)
    if url not in _CREATED:
        async with a_boto_transport(access) as transport:
            await an_aws_client(transport).call("s3", "CreateBucket", {"Bucket": BUCKET})
        _CREATED.add(url)
    async with an_http_transport(access) as transport:
        client = an_aws_client(transport)
        try:
            yield S3Blobs(
                client=client,
                presigner=transport,
                clock=SystemClock(),
                random=Random(1),
                bucket=BUCKET,
                packing=Packing(wait_s=0.02),
            )
        finally:
            await _clear(client)


async def _clear(client: AwsClient) -> None:
    with trio.CancelScope(shield=True):
        listed = await client.call("s3", "ListObjectsV2", {"Bucket": BUCKET})
        objects = [{"Key": listed_object["Key"]} for listed_object in listed.get("Contents", ())]
        if objects:
            params = {"Bucket": BUCKET, "Delete": {"Objects": objects, "Quiet": True}}
            await client.call("s3", "DeleteObjects", params)


BLOBS: dict[str, OpenBlobs] = {
    **{name: partial(_of_engine, name) for name in ENGINES},
    "s3": _open_emulator,
}
