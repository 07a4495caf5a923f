"""The blobs that the laws are run against: every engine's, and S3 emulated."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random

import pytest
import trio

from conveyor.engines.aws.blobs import S3Blobs
from conveyor.engines.aws.boto import open_boto_plane
from conveyor.engines.aws.seam import Seam
from conveyor.engines.system import SystemClock
from conveyor.ports.blobs import Blobs
from tests.aws import a_lean_plane, a_seam, an_access
from tests.builders import ManualClock
from tests.conformance.engines import ENGINES

BUCKET = "conformance"
_MADE: set[str] = set()

OpenBlobs = Callable[[pytest.FixtureRequest, Path], AbstractAsyncContextManager[Blobs]]


@asynccontextmanager
async def _of_engine(
    name: str, request: pytest.FixtureRequest, data_dir: Path
) -> AsyncIterator[Blobs]:
    async with ENGINES[name](data_dir, ManualClock(), Random(1)) as engine:
        yield engine.blobs


@asynccontextmanager
async def _emulated(request: pytest.FixtureRequest, data_dir: Path) -> AsyncIterator[Blobs]:
    async with s3_blobs(request.getfixturevalue("seaweed")) as blobs:
        yield blobs


@asynccontextmanager
async def s3_blobs(url: str) -> AsyncIterator[S3Blobs]:
    """In a bucket that is empty before and after: a server has room for few of them."""
    access = an_access(s3=url)
    if url not in _MADE:
        async with open_boto_plane(access) as plane:
            await a_seam(plane).call("s3", "CreateBucket", {"Bucket": BUCKET})
        _MADE.add(url)
    async with a_lean_plane(access) as plane:
        seam = a_seam(plane)
        try:
            yield S3Blobs(
                seam=seam, presigner=plane, clock=SystemClock(), random=Random(1), bucket=BUCKET
            )
        finally:
            await _clear(seam)


async def _clear(seam: Seam) -> None:
    with trio.CancelScope(shield=True):
        listed = await seam.call("s3", "ListObjectsV2", {"Bucket": BUCKET})
        objects = [{"Key": each["Key"]} for each in listed.get("Contents", ())]
        if objects:
            params = {"Bucket": BUCKET, "Delete": {"Objects": objects, "Quiet": True}}
            await seam.call("s3", "DeleteObjects", params)


BLOBS: dict[str, OpenBlobs] = {
    **{name: partial(_of_engine, name) for name in ENGINES},
    "s3": _emulated,
}
