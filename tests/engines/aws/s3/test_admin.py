"""The bucket as `init` creates it."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest

from conveyor.domain.ids import FIRST_BATCH, JobId, RunId
from conveyor.engines.aws.client.boto_transport import open_boto_transport
from conveyor.engines.aws.client.client import AwsClient
from conveyor.engines.aws.errors import AwsError, NotAllowed
from conveyor.engines.aws.s3 import PRIVATE, lifecycle, make_bucket
from conveyor.usecases.submit import staging
from tests.aws import REGION, an_access, an_aws_client
from tests.engines.aws.scripted import ScriptedTransport

NUMBERS = itertools.count()


@pytest.fixture
async def client(moto: str) -> AsyncIterator[AwsClient]:
    async with open_boto_transport(an_access(s3=moto)) as transport:
        yield an_aws_client(transport)


@pytest.fixture
def bucket() -> str:
    return f"made-{next(NUMBERS)}"


async def rules_of(client: AwsClient, bucket: str) -> list[dict[str, Any]]:
    there = await client.call("s3", "GetBucketLifecycleConfiguration", {"Bucket": bucket})
    return list(there["Rules"])


async def days_of(client: AwsClient, bucket: str) -> dict[str, int]:
    """After how many days objects are deleted, by key prefix."""
    return {
        rule["Filter"]["Prefix"]: rule["Expiration"]["Days"]
        for rule in await rules_of(client, bucket)
        if "Expiration" in rule
    }


@pytest.mark.slow
async def test_a_bucket_is_private_and_has_rules_that_delete_leftovers(
    client: AwsClient, bucket: str
) -> None:
    for _ in range(2):
        assert await make_bucket(client, bucket, region=REGION, body_days=30) == []

    rules = await rules_of(client, bucket)
    access = await client.call("s3", "GetPublicAccessBlock", {"Bucket": bucket})

    assert rules == lifecycle(30)
    assert access["PublicAccessBlockConfiguration"] == PRIVATE


@pytest.mark.slow
async def test_bodies_expire_by_age_and_staged_lists_do_not(client: AwsClient, bucket: str) -> None:
    await make_bucket(client, bucket, region=REGION, body_days=30)

    assert await days_of(client, bucket) == {"inputs/": 30, "jobs/": 30}
    assert not staging.source_key(JobId("j"), RunId("r"), FIRST_BATCH).startswith("jobs/")


@pytest.mark.slow
async def test_another_number_of_days_changes_the_rule(client: AwsClient, bucket: str) -> None:
    for days in (30, 7, 365):
        await make_bucket(client, bucket, region=REGION, body_days=days)

        assert await days_of(client, bucket) == {"inputs/": 30, "jobs/": days}


@pytest.mark.slow
@pytest.mark.parametrize("last", [["jobs/3/sources/5/0"], ["jobs/3/sources/3/try/0", "jobs/4/x"]])
async def test_no_rule_applies_to_staged_lists_of_an_earlier_release(
    client: AwsClient, bucket: str, last: list[str]
) -> None:
    await client.call("s3", "CreateBucket", {"Bucket": bucket})
    keys = ["inputs/1/list", "jobs/1/runs/1/a.1", "jobs/2/exports/1/1/1/file", "jobs/2/zzz"]
    for key in [*keys, *last, "sources/1/1/0"]:
        await client.call("s3", "PutObject", {"Bucket": bucket, "Key": key, "Body": b"x"})

    [remark] = await make_bucket(client, bucket, region=REGION, body_days=30)
    before = await days_of(client, bucket)
    await client.call("s3", "DeleteObject", {"Bucket": bucket, "Key": last[0]})
    after = await make_bucket(client, bucket, region=REGION, body_days=30)

    assert "lists of an earlier release" in remark
    assert before == {"inputs/": 30}
    assert (after, await days_of(client, bucket)) == ([], {"inputs/": 30, "jobs/": 30})


@pytest.mark.slow
async def test_rules_that_others_added_to_the_bucket_are_kept(
    client: AwsClient, bucket: str
) -> None:
    logs = {
        "ID": "their-logs",
        "Status": "Enabled",
        "Filter": {"Prefix": "logs/"},
        "Expiration": {"Days": 7},
    }
    await client.call("s3", "CreateBucket", {"Bucket": bucket})
    theirs = {"Bucket": bucket, "LifecycleConfiguration": {"Rules": [logs]}}
    await client.call("s3", "PutBucketLifecycleConfiguration", theirs)

    for _ in range(2):
        await make_bucket(client, bucket, region=REGION, body_days=30)

    assert await rules_of(client, bucket) == [logs, *lifecycle(30)]


async def test_a_bucket_of_another_account_is_refused(bucket: str) -> None:
    transport = ScriptedTransport(
        AwsError("BucketAlreadyExists", "taken", status=409),
        AwsError("Forbidden", "not yours", status=403),
    )

    with pytest.raises(NotAllowed, match="Forbidden"):
        await make_bucket(an_aws_client(transport), bucket, region=REGION, body_days=30)


async def test_a_bucket_is_created_in_the_configured_region(bucket: str) -> None:
    transport = ScriptedTransport({})

    await make_bucket(an_aws_client(transport), bucket, region="eu-west-1", body_days=30)

    [_, operation, params] = transport.asked[0]
    assert operation == "CreateBucket"
    assert params["CreateBucketConfiguration"] == {"LocationConstraint": "eu-west-1"}
