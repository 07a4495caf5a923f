"""The bucket as `init` makes it."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator

import pytest

from conveyor.engines.aws.boto import open_boto_plane
from conveyor.engines.aws.buckets import LIFECYCLE, PRIVATE, make_bucket
from conveyor.engines.aws.errors import AwsError, NotAllowed
from conveyor.engines.aws.seam import Seam
from tests.aws import REGION, a_seam, an_access
from tests.engines.aws.scripted import ScriptedPlane

NUMBERS = itertools.count()


@pytest.fixture
async def seam(moto: str) -> AsyncIterator[Seam]:
    async with open_boto_plane(an_access(s3=moto)) as plane:
        yield a_seam(plane)


@pytest.fixture
def bucket() -> str:
    return f"made-{next(NUMBERS)}"


@pytest.mark.slow
async def test_a_bucket_is_private_and_cleans_up_after_us(seam: Seam, bucket: str) -> None:
    await make_bucket(seam, bucket, region=REGION)
    await make_bucket(seam, bucket, region=REGION)

    rules = await seam.call("s3", "GetBucketLifecycleConfiguration", {"Bucket": bucket})
    access = await seam.call("s3", "GetPublicAccessBlock", {"Bucket": bucket})

    assert rules["Rules"] == LIFECYCLE["Rules"]
    assert access["PublicAccessBlockConfiguration"] == PRIVATE


@pytest.mark.slow
async def test_no_rule_removes_bodies_or_the_lists_of_jobs(seam: Seam, bucket: str) -> None:
    await make_bucket(seam, bucket, region=REGION)

    rules = await seam.call("s3", "GetBucketLifecycleConfiguration", {"Bucket": bucket})

    expiring = [rule["Filter"]["Prefix"] for rule in rules["Rules"] if "Expiration" in rule]
    assert expiring == ["inputs/"]


@pytest.mark.slow
async def test_rules_that_somebody_else_gave_the_bucket_are_kept(seam: Seam, bucket: str) -> None:
    logs = {
        "ID": "their-logs",
        "Status": "Enabled",
        "Filter": {"Prefix": "logs/"},
        "Expiration": {"Days": 7},
    }
    await seam.call("s3", "CreateBucket", {"Bucket": bucket})
    theirs = {"Bucket": bucket, "LifecycleConfiguration": {"Rules": [logs]}}
    await seam.call("s3", "PutBucketLifecycleConfiguration", theirs)

    for _ in range(2):
        await make_bucket(seam, bucket, region=REGION)

    rules = await seam.call("s3", "GetBucketLifecycleConfiguration", {"Bucket": bucket})
    assert rules["Rules"] == [logs, *LIFECYCLE["Rules"]]


async def test_a_bucket_of_somebody_else_is_refused(bucket: str) -> None:
    plane = ScriptedPlane(
        AwsError("BucketAlreadyExists", "taken", status=409),
        AwsError("Forbidden", "not yours", status=403),
    )

    with pytest.raises(NotAllowed, match="Forbidden"):
        await make_bucket(a_seam(plane), bucket, region=REGION)


async def test_a_bucket_is_made_in_the_region_that_is_asked_for(bucket: str) -> None:
    plane = ScriptedPlane({})

    await make_bucket(a_seam(plane), bucket, region="eu-west-1")

    [_, operation, params] = plane.asked[0]
    assert operation == "CreateBucket"
    assert params["CreateBucketConfiguration"] == {"LocationConstraint": "eu-west-1"}
