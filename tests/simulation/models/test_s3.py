"""Tests each fault of the model of S3, and its presigned URLs."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from conveyor.engines.aws.errors import AwsError, NoResponse
from conveyor.simulation.models.fault_rates import S3Faults
from tests.simulation.models.worlds import World


async def test_s3_may_refuse_a_call_with_slow_down(world: World) -> None:
    world.set_faults(S3Faults(slow_down_rate=1.0))

    with pytest.raises(AwsError, match="SlowDown"):
        await world.s3("PutObject", Key="a", Body=b"x")
    world.clear_faults()

    with pytest.raises(AwsError, match="NoSuchKey"):
        await world.s3("GetObject", Key="a")


async def test_s3_may_be_slow(world: World, autojump_clock: MockClock) -> None:
    world.set_faults(S3Faults(slow_rate=1.0, slow_s=(30.0, 30.0)))
    start = trio.current_time()

    await world.s3("PutObject", Key="a", Body=b"x")

    assert trio.current_time() - start == 30.0
    assert world.fault_source.fault_counts["s3.slow"] == 1


async def test_a_put_may_have_its_effect_without_an_answer(world: World) -> None:
    world.set_faults(S3Faults(lost_put_rate=1.0))

    with pytest.raises(NoResponse):
        await world.s3("PutObject", Key="a", Body=b"x")
    world.clear_faults()

    assert (await world.s3("GetObject", Key="a"))["Body"] == b"x"


async def test_a_list_may_be_truncated(world: World) -> None:
    for name in "abc":
        await world.s3("PutObject", Key=f"k/{name}", Body=b"x")
    world.set_faults(S3Faults(truncated_list_rate=1.0))

    page = await world.s3("ListObjectsV2", Prefix="k/")
    rest = await world.s3("ListObjectsV2", ContinuationToken=page["NextContinuationToken"])

    assert [entry["Key"] for entry in page["Contents"]] == ["k/a"]
    assert page["IsTruncated"]
    assert [entry["Key"] for entry in rest["Contents"]] == ["k/b"]


async def test_some_objects_may_not_be_deleted(world: World) -> None:
    names = [f"k/{number}" for number in range(10)]
    for name in names:
        await world.s3("PutObject", Key=name, Body=b"x")
    world.set_faults(S3Faults(undeleted_rate=0.5))

    objects = [{"Key": name} for name in names]
    answer = await world.s3("DeleteObjects", Delete={"Objects": objects, "Quiet": True})

    left = await world.s3("ListObjectsV2", Prefix="k/")
    assert 0 < len(answer["Errors"]) < 10
    assert [entry["Key"] for entry in left["Contents"]] == [
        entry["Key"] for entry in answer["Errors"]
    ]


async def test_an_upload_in_parts_may_be_left_open(world: World) -> None:
    upload = await world.s3("CreateMultipartUpload", Key="a")
    world.set_faults(S3Faults(left_open_rate=1.0))

    with pytest.raises(AwsError, match="ServiceUnavailable"):
        await world.s3("AbortMultipartUpload", Key="a", UploadId=upload["UploadId"])

    assert list(world.aws.s3.uploads) == [upload["UploadId"]]
    with pytest.raises(AwsError, match="NoSuchKey"):
        await world.s3("GetObject", Key="a")


async def test_a_read_may_be_interrupted(world: World) -> None:
    await world.s3("PutObject", Key="a", Body=b"x" * 1_000_000)
    world.set_faults(S3Faults(broken_read_rate=1.0))
    got: list[bytes] = []

    async def read() -> None:
        request = {"Bucket": "bodies", "Key": "a"}
        async with world.aws.open("s3", "GetObject", request, deadline_s=60.0) as answer:
            got.extend([piece async for piece in answer["Body"]])

    with pytest.raises(NoResponse):
        await read()
    assert world.fault_source.fault_counts["s3.broken_read"] == 1


async def test_a_read_returns_the_object_that_existed_when_it_began(world: World) -> None:
    await world.s3("PutObject", Key="a", Body=b"old" * 100_000)
    request = {"Bucket": "bodies", "Key": "a"}

    async with world.aws.open("s3", "GetObject", request, deadline_s=60.0) as answer:
        await world.s3("PutObject", Key="a", Body=b"new")
        body = b"".join([piece async for piece in answer["Body"]])

    assert body == b"old" * 100_000


async def test_conditional_writes_are_checked(world: World) -> None:
    first = await world.s3("PutObject", Key="a", Body=b"x", IfNoneMatch="*")

    with pytest.raises(AwsError, match="PreconditionFailed"):
        await world.s3("PutObject", Key="a", Body=b"y", IfNoneMatch="*")
    await world.s3("PutObject", Key="a", Body=b"y", IfMatch=first["ETag"])
    with pytest.raises(AwsError, match="PreconditionFailed"):
        await world.s3("PutObject", Key="a", Body=b"z", IfMatch=first["ETag"])

    assert (await world.s3("GetObject", Key="a"))["Body"] == b"y"


async def test_a_presigned_url_allows_its_request_until_it_expires(
    world: World, autojump_clock: MockClock
) -> None:
    blobs = (await world.engine()).blobs
    until = world.clock.now() + 60
    up = await blobs.upload_url("k/a", content_type="text/csv", expires_at=until)
    down = await blobs.download_url(
        "k/a", content_type="text/html", filename="a.html", expires_at=until
    )
    assert up is not None
    assert down is not None
    csv = {"content-type": "text/csv", "content-length": "1"}
    handle = world.aws.s3.handle

    assert handle("GET", down, {}, b"")[0] == 404
    assert handle("PUT", up, {**csv, "content-type": "text/plain"}, b"x")[0] == 403
    assert handle("PUT", up, {"content-type": "text/csv"}, b"x")[0] == 411
    assert handle("GET", up, {}, b"")[0] == 403
    assert handle("PUT", up + "0", csv, b"x")[0] == 403
    assert handle("PUT", up, csv, b"x")[0] == 200
    status, headers, body = handle("GET", down, {}, b"")
    assert [status, headers["content-type"], body] == [200, "text/html", b"x"]
    assert headers["content-disposition"] == 'attachment; filename="a.html"'
    await trio.sleep(60)
    assert handle("GET", down, {}, b"")[0] == 403
